"""How transformers' attention reaches this library: the calls inside a step, on its thread.

An attention function registered with transformers under the name ``radixkv_<native>`` serves the
calls that are made inside `attending`, on that thread; any other call of the model goes on to its
native attention, so the model stays usable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.attention.batch import ScoreRule


class AttentionHandler(Protocol):
    """Serves one layer's attention inside `attending`; shapes as transformers gives them.

    Where the model passes a mask, ``keywords`` has it as ``attention_mask``. A handler that has
    ``note_mask(make, keywords)`` is asked for each mask that transformers would build: it gives
    the tensor, or None. For others no mask is built.
    """

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, num_q_heads, num_tokens, head_dim]
        key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: Tensor,  # [1, num_kv_heads, num_tokens, v_head_dim]
        keywords: Mapping[str, Any],
    ) -> Tensor: ...  # [1, num_tokens, num_q_heads, v_head_dim]


class _Active(threading.local):
    handler: AttentionHandler | None = None


active = _Active()


@contextmanager
def attending(handler: AttentionHandler) -> Iterator[None]:
    """Within this block, on this thread, ``handler`` computes every layer's attention."""
    active.handler = handler
    try:
        yield
    finally:
        active.handler = None


def native_attention(module: torch.nn.Module, native: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if native == "eager":
        # Eager attention lives in each model's own file, under one name.
        home: Any = sys.modules[type(module).__module__]
        return home.eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[native]  # type: ignore[no-any-return]


@cache
def register(native: str) -> str:
    """Register our attention, falling back to ``native`` outside `attending`; gives its name."""
    native = native.removeprefix("radixkv_")
    if native not in ("sdpa", "eager"):
        native = "sdpa"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        handler = active.handler
        if handler is None:
            run = native_attention(module, native)
            return run(module, query, key, value, attention_mask, **keywords)  # type: ignore[no-any-return]
        if attention_mask is not None:
            keywords["attention_mask"] = attention_mask
        return handler(module, query, key, value, keywords), None

    def mask(*args: Any, **keywords: Any) -> Any:
        handler = active.handler
        if handler is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[native](*args, **keywords)
        note = getattr(handler, "note_mask", None)
        if note is None:
            return None
        return note(partial(ALL_MASK_ATTENTION_FUNCTIONS[native], *args), keywords)

    name = f"radixkv_{native}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def score_rule(keywords: Mapping[str, Any], head_dim: int) -> ScoreRule:
    """What transformers' attention keywords ask for, as a `ScoreRule`."""
    scaling = keywords.get("scaling")
    sinks = keywords.get("s_aux")
    return ScoreRule(
        softmax_scale=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=keywords.get("sliding_window"),
        softcap=keywords.get("softcap"),
        sinks=None if sinks is None else sinks.detach(),
    )
