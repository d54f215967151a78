"""What an engine has done so far, in numbers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from radixkv.cache.stats import CacheStats
from radixkv.engine.request import Request

_HISTORY = 4096  # requests and steps that the percentiles of `EngineStats` look back on


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


class Tally:
    """What an engine counts as it runs."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._ttfts: deque[float] = deque(maxlen=_HISTORY)
        self._gaps: deque[float] = deque(maxlen=_HISTORY)
        self._batches: deque[tuple[int, int]] = deque(maxlen=_HISTORY)

    def count_step(self, num_tokens: int, num_seqs: int) -> None:
        """Count a batch that the model ran."""
        self._totals["steps"] += 1
        self._batches.append((num_tokens, num_seqs))

    def count_reads(self, num_bytes: int, num_bytes_alone: int) -> None:
        """Count the bytes of KV that a step read, and what it had read without sharing."""
        self._totals["kv_read"] += num_bytes
        self._totals["kv_alone"] += num_bytes_alone

    def count_request(self, request: Request) -> None:
        """Count a request that has ended."""
        how = "failed" if request.error else "aborted" if request.aborted else "done"
        totals = self._totals
        totals[how] += 1
        totals["prompt"] += len(request.prompt_token_ids)
        totals["cached"] += request.cached_tokens
        totals["prefill"] += request.metrics.prefill_tokens
        totals["decode"] += request.metrics.decode_tokens
        if request.num_tokens:
            self._ttfts.append(request.metrics.ttft_s)
        self._gaps.extend(request.token_gaps)

    def stats(self, num_live: int, preemptions: int, cache: CacheStats) -> EngineStats:
        """All of it, with what others count."""
        totals = self._totals
        batches = list(self._batches)  # the engine's thread goes on appending
        tokens = [tokens for tokens, _ in batches]
        seqs = [seqs for _, seqs in batches]
        return EngineStats(
            requests_done=totals["done"],
            requests_failed=totals["failed"],
            requests_aborted=totals["aborted"],
            requests_live=num_live,
            prompt_tokens=totals["prompt"],
            cached_tokens=totals["cached"],
            prefill_tokens=totals["prefill"],
            decode_tokens=totals["decode"],
            steps=totals["steps"],
            kv_bytes_read=totals["kv_read"],
            kv_bytes_alone=totals["kv_alone"],
            preemptions=preemptions,
            ttft_p50_s=percentile(self._ttfts, 0.5),
            ttft_p95_s=percentile(self._ttfts, 0.95),
            token_p50_s=percentile(self._gaps, 0.5),
            token_p95_s=percentile(self._gaps, 0.95),
            batch_tokens_p50=percentile(tokens, 0.5),
            batch_tokens_max=max(tokens, default=0),
            batch_seqs_p50=percentile(seqs, 0.5),
            batch_seqs_max=max(seqs, default=0),
            cache=cache,
        )


def percentile(values: Collection[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
