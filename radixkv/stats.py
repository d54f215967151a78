"""What an engine has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from radixkv.cache import CacheStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was made.

    Attributes:
        requests_done, requests_failed, requests_aborted: ended requests, by how they ended.
        requests_live: submitted and not ended.
        prompt_tokens: of requests that were started.
        cached_tokens: of those, tokens whose KV came from the cache.
        prefill_tokens, decode_tokens: tokens that the model ran.
        steps: batches that the model ran.
        kv_bytes_read: bytes of K and V that attention read, in all layers; what a sliding
            window hides is counted.
        kv_bytes_alone: the same if no two sequences had read a shared page together.
        preemptions: times that a sequence gave its pages back and waited again.
        ttft_p50_s, ttft_p95_s: time to first token of recent requests; None before any.
        token_p50_s, token_p95_s: time between tokens of recent requests.
        batch_tokens_p50, batch_tokens_max: tokens of recent steps.
        batch_seqs_p50, batch_seqs_max: sequences of recent steps.
        cache: the cache's own statistics.
    """

    requests_done: int
    requests_failed: int
    requests_aborted: int
    requests_live: int
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    decode_tokens: int
    steps: int
    kv_bytes_read: int
    kv_bytes_alone: int
    preemptions: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    token_p50_s: float | None
    token_p95_s: float | None
    batch_tokens_p50: float | None
    batch_tokens_max: int
    batch_seqs_p50: float | None
    batch_seqs_max: int
    cache: CacheStats


def percentile(values: Collection[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
