"""How transformers' attention reaches this library: the calls inside a step, on its thread.

An attention function registered with transformers under the name ``radixkv_<native>`` serves the
calls that are made inside `attending`, on that thread; any other call of the model goes on to its
native attention, so the model stays usable.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.batch import ScoreRule

Served = Callable[[torch.nn.Module, Mapping[str, Any], Mapping[str, Any]], None]
"""Serves one layer's attention in place: called with its module, its keywords, its family's."""


class AttentionHandler(ABC):
    """Serves every layer's attention inside `attending`; shapes as transformers gives them.

    Attributes:
        fused_pass: what `radixkv.models.decoder_layer` hands from layer to layer.
    """

    fused_pass: Any = None

    @abstractmethod
    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        """Attend in one layer.

        Args:
            module: the layer's attention.
            query: [1, num_q_heads, num_tokens, head_dim].
            key: [1, num_kv_heads, num_tokens, head_dim]; value: the same with v_head_dim.
            keywords: as the model passes them; a mask as ``attention_mask``.
        Returns:
            [1, num_tokens, num_q_heads, v_head_dim].
        """

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Served | None:
        """What serves layers whose rows lie there, each [num_tokens, num_heads, dim]; or None."""
        return None

    def wanted(self, module: torch.nn.Module) -> Tensor | None:
        """The rows that anything will read of what this attention's layer gives; None is all.

        The others may come out as zeros. Asked once the layer's attention was served. [n] int64.
        """
        return None

    def note_mask(self, make: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
        """The mask to pass on, where transformers would build one: ``make(**keywords)``, or None.

        Nothing is built unless ``make`` is called.
        """
        return None


class _Active(threading.local):
    # Of the thread, because transformers calls a registered function by name, with nothing of
    # ours among its arguments, and other threads may call the same model as it stands meanwhile.
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
        return handler.note_mask(partial(ALL_MASK_ATTENTION_FUNCTIONS[native], *args), keywords)

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
