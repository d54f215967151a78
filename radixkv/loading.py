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
    """The tokens that end a text: of the generation config, the config and the tokenizer.

    A fine-tune often has its own in one of them, and the base model's in the others.
    """
    config = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), config, text_config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if isinstance(eos, torch.Tensor):
            eos = eos.flatten().tolist()
        if eos is not None:
            found |= {int(i) for i in (eos if isinstance(eos, (list, tuple)) else [eos])}
    return frozenset(i for i in found if 0 <= i < vocab_size)
