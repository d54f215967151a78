"""What an engine asks of Python and of the processor while it loads a model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


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


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX on x86, BF16 on Arm)."""
    flags: set[str] = set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            break
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


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
