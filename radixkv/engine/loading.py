"""Loading a checkpoint with transformers: the model, its tokenizer, the tokens that end a text."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from radixkv.machine import cpu_has_bfloat16
from radixkv.models.checkpoint import named_refusals
from radixkv.models.small_model import hidden_progress_bars

_OF_BOTH = ("gguf_file", "revision", "trust_remote_code", "token", "subfolder")

logger = logging.getLogger("radixkv")


def load_checkpoint(
    where: str,
    name_or_path: str | os.PathLike[str],
    device: str | torch.device,
    dtype: str | torch.dtype,
    transformers_kwargs: dict[str, Any],
    ours: list[str],
) -> tuple[Any, Any]:
    """A model and its tokenizer, None where there is none; all options are checked.

    Args:
        where: the call that errors name.
        dtype: ``"auto"`` is the checkpoint's own, but float32 on a CPU that has no bfloat16
            arithmetic.
        transformers_kwargs: of the model; those of `_OF_BOTH` of the tokenizer too.
        ours: options that are not transformers', for errors.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with named_refusals(where, name_or_path, ours):
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=dtype, **transformers_kwargs
        )
    if (
        dtype == "auto"
        and torch.device(device).type == "cpu"
        and model.dtype != torch.float32
        and not (model.dtype == torch.bfloat16 and cpu_has_bfloat16())
    ):
        logger.warning(
            "%s: running in float32, since this CPU has no %s arithmetic; pass dtype= to choose",
            name_or_path,
            str(model.dtype).removeprefix("torch."),
        )
        model = model.float()
    of_both = {name: value for name, value in transformers_kwargs.items() if name in _OF_BOTH}
    try:
        return model, AutoTokenizer.from_pretrained(name_or_path, **of_both)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s: no tokenizer (%s); prompts must be token ids", name_or_path, error)
        return model, None


def no_bars_in_a_pipe() -> AbstractContextManager[None]:
    """Within this block other libraries' bars are shown to who sees them move, on a terminal.

    In a file or a pipe a bar is a long line of all its states.
    """
    is_seen = sys.stderr is not None and sys.stderr.isatty()
    return nullcontext() if is_seen else hidden_progress_bars()


@contextmanager
def no_collections() -> Iterator[None]:
    """No cyclic garbage collection within the block, if there was any.

    Half a million objects come with the imports and stay: looking at them again and again takes
    a tenth of the whole.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else what its owner froze would be thawed
                gc.freeze()  # and at once back: all count as old now, without having been looked at
                gc.unfreeze()
            gc.enable()


def find_eos_token_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The tokens that end a text: those of the model, and the tokenizer's own.

    The model's are what its generation config names, as in transformers, or else its config. A
    fine-tune often has the base model's there, and its own in the tokenizer alone.
    """
    config = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sources = (getattr(model, "generation_config", None), config, text_config)
    named = (getattr(source, "eos_token_id", None) for source in sources)
    of_model = next((eos for eos in named if eos is not None), None)
    found: set[int] = set()
    for eos in (of_model, getattr(tokenizer, "eos_token_id", None)):
        if isinstance(eos, torch.Tensor):
            eos = eos.flatten().tolist()
        if eos is not None:
            found |= {int(i) for i in (eos if isinstance(eos, (list, tuple)) else [eos])}
    return frozenset(i for i in found if 0 <= i < vocab_size)
