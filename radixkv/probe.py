"""A model is tried before it is served: what its attention asks for, whether its logits stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.batch import Batch, Run, build_batch
from radixkv.cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.errors import UnsupportedModelError
from radixkv.interface import score_rule
from radixkv.quant import KVCodec, KVSpec
from radixkv.reference import attend_dense
from radixkv.support import Seen, refuse


@dataclass
class Recorder:
    """Notes each attention call, and answers it with plain dense attention."""

    seen: dict[int, Seen] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)  # [num_kv_heads, num_tokens, head_dim]

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or layer_idx in self.seen:
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected attention modules that are each called once "
                f"and know their layer_idx, got {layer_idx!r}; this engine cannot tell which "
                f"pages are theirs"
            )
        spec = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        is_causal = keywords.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        self.seen[layer_idx] = Seen(query.shape[1], spec, dict(keywords), bool(is_causal))
        self.keys[layer_idx] = key[0].float()
        rule = score_rule(keywords, query.shape[3])
        out = attend_dense(query[0].float(), key[0].float(), value[0].float(), rule)
        return out.transpose(0, 1)[None].to(query.dtype)


class Runner(Protocol):
    """What `radixkv.model.ModelRunner` has that a trial needs."""

    model: Any
    spec: KVSpec
    device: torch.device

    def forward(self, batch: Batch, cache: PrefixCache) -> Tensor: ...


def self_test(runner: Runner, token_ids: list[int], expected: Tensor) -> None:
    # Two steps over unquantized pages, a second sequence that decodes beside: positions, masks
    # and page reads must all be right for this to give the model's own logits.
    config = KVConfig(dtype="model", page_size=4)
    capacity = 4 * len(token_ids) * KVCodec(runner.spec, config).bytes_per_token
    cache = PrefixCache(
        runner.spec, replace(config, capacity=capacity), device=runner.device, backend="torch"
    )
    half, others = len(token_ids) // 2, token_ids[:-3:-1]
    with cache.acquire(token_ids) as lease, cache.acquire(others) as other:
        parts = []
        for step, (start, stop) in enumerate(((0, half), (half, len(token_ids)))):
            runs = [
                Run(other, others[step : step + 1], step, step + 1, 0, step + 1),
                Run(lease, token_ids[start:stop], start, stop, 0, 0),
            ]
            parts.append(runner.forward(build_batch(runs, runner.device), cache))
        got = torch.cat(parts)
    spread = (expected.max() - expected.min()).clamp_min(1e-6)
    error = float((got - expected).abs().max() / spread)
    limit = 1e-4 if runner.spec.dtype == torch.float32 else 5e-2
    if not error <= limit:
        raise refuse(
            runner.model,
            f"its logits over pages differ from its own by {error:.2g} of their range "
            f"(limit {limit:g})",
            "something in its attention or positions is not served rightly",
        )
