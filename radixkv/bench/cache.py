"""What the cache costs a request: traces of three kinds, timed without a model.

A request is acquire, commit, release, with eviction running. Three traces:

- ``rag``: a system prompt, documents of skewed popularity (Zipf), a question of its own;
- ``agent``: conversations whose history grows turn by turn, each turn sending all of it;
- ``samples``: prompts that are each asked several times, with different answers.

The baseline is brute force: the longest common prefix with each of the last sequences that
the capacity holds, by bytes compares.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.layout import KVSpec
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tree import Tokens, common_prefix, encode_tokens
from radixkv.config import KVConfig, require_choice, require_int
from radixkv.machine import num_cpus, processor_name

TokenIds = NDArray[np.int64]
VOCABULARY = 50_000


@dataclass(frozen=True)
class Request:
    """One request: the prompt that is looked up, and prompt plus answer, which is committed."""

    prompt: TokenIds
    whole: TokenIds


def rag_trace(num_requests: int = 2000, seed: int = 0) -> Iterator[Request]:
    """About 1,440 tokens a request: system prompt, 3 documents of 200 (Zipf), question, answer."""
    random = np.random.default_rng(seed)

    def fresh(count: int) -> TokenIds:
        return random.integers(0, VOCABULARY, count)

    system = fresh(256)
    documents = [fresh(int(n)) for n in random.integers(256, 464, 200)]
    for _ in range(num_requests):
        chosen = (random.zipf(1.2, 3) - 1) % len(documents)
        parts = [system, *(documents[int(i)] for i in np.sort(chosen)), fresh(52)]
        prompt = np.concatenate(parts)
        yield Request(prompt, np.concatenate([prompt, fresh(64)]))


def agent_trace(num_requests: int = 1800, seed: int = 0) -> Iterator[Request]:
    """About 3,100 tokens a request: 60 agents at a time, 30 turns each, a shared system prompt."""
    random = np.random.default_rng(seed)

    def fresh(count: int) -> TokenIds:
        return random.integers(0, VOCABULARY, count)

    system = fresh(800)
    histories: list[TokenIds] = []
    turns: list[int] = []
    for _ in range(num_requests):
        if len(histories) < 60 and (not histories or random.random() < 0.2):
            histories.append(system)
            turns.append(0)
        at = int(random.integers(len(histories)))
        prompt = np.concatenate([histories[at], fresh(int(random.integers(40, 160)))])
        whole = np.concatenate([prompt, fresh(int(random.integers(20, 100)))])
        yield Request(prompt, whole)
        histories[at] = whole
        turns[at] += 1
        if turns[at] == 30:
            histories.pop(at)
            turns.pop(at)


def samples_trace(num_requests: int = 1920, seed: int = 0) -> Iterator[Request]:
    """About 2,070 tokens a request: each prompt asked 16 times, another answer each time."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, VOCABULARY, 1)
    for i in range(num_requests):
        if i % 16 == 0:
            prompt = random.integers(0, VOCABULARY, int(random.integers(1700, 2180)))
        answer = random.integers(0, VOCABULARY, int(random.integers(64, 192)))
        yield Request(prompt, np.concatenate([prompt, answer]))


TRACES: dict[str, Callable[..., Iterator[Request]]] = {
    "rag": rag_trace,
    "agent": agent_trace,
    "samples": samples_trace,
}


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """What one trace cost and found.

    Attributes:
        trace, num_requests, mean_tokens: what ran; tokens committed a request.
        ids: how token ids were given: "list" or "array".
        us_mean, us_p50, us_p99: microseconds a request.
        tokens_matched, hit_rate: prompt tokens found, and their share.
        baseline_us_mean, baseline_tokens_matched: brute force on the same trace; None if left
            out.
        evicted_pages, nodes: at the end.
        host_bytes_per_token: host memory of the tree a cached token, by tracemalloc.
    """

    trace: str
    ids: str
    num_requests: int
    mean_tokens: float
    us_mean: float
    us_p50: float
    us_p99: float
    tokens_matched: int
    hit_rate: float
    baseline_us_mean: float | None
    baseline_tokens_matched: int | None
    evicted_pages: int
    nodes: int
    host_bytes_per_token: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class BruteForce:
    """The last sequences that the capacity holds, each compared with every query."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._stored = 0
        self._sequences: OrderedDict[bytes, Tokens] = OrderedDict()

    def request(self, prompt: Any, whole: Any) -> int:
        """Look the prompt up, store the whole; returns the tokens that matched."""
        query = encode_tokens(prompt)[:-1]
        best, longest = None, -1
        for name, known in self._sequences.items():
            shared = common_prefix(known, query)
            if shared > longest:
                best, longest = name, shared
        if best is not None:
            self._sequences.move_to_end(best)
        tokens = encode_tokens(whole)
        name = tokens.tobytes()
        if name not in self._sequences:
            self._sequences[name] = tokens
            self._stored += tokens.size
            while self._stored > self._capacity:
                _, oldest = self._sequences.popitem(last=False)
                self._stored -= oldest.size
        return max(longest, 0)


def make_cache(capacity_tokens: int, page_size: int, eviction: str = "lru") -> PrefixCache:
    """A cache of so many tokens whose rows are as small as they get: bookkeeping dominates."""
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float16)
    num_pages = -(-capacity_tokens // page_size)
    return PrefixCache(
        spec,
        KVConfig(
            dtype="model",
            page_size=page_size,
            capacity=num_pages * page_size * 4,
            eviction=eviction,  # type: ignore[arg-type]
        ),
        backend="torch",
    )


def request(cache: PrefixCache, prompt: Any, whole: Any) -> int:
    """Acquire ``whole``, commit and release it; returns the tokens that matched.

    As an engine without a model would: what the prompt and the answer add is taken as written.
    """
    lease = cache.acquire(whole)
    lease.commit(lease.num_tokens)
    lease.release()
    return min(lease.num_cached, len(prompt) - 1)


def run_trace(
    trace: str,
    *,
    num_requests: int | None = None,
    capacity_tokens: int = 200_000,
    page_size: int = 16,
    ids: str = "list",
    baseline: bool = True,
    measure_memory: bool = True,
    seed: int = 0,
    eviction: str = "lru",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> TraceResult:
    """Run one trace and say what a request costs.

    Args:
        trace: ``"rag"``, ``"agent"`` or ``"samples"``.
        num_requests: None is the trace's own default.
        ids: give token ids as ``"list"`` or as ``"array"`` (int64).
        baseline: run brute force over the same requests too.
        measure_memory: run once more under tracemalloc for the host bytes a cached token.
        tell: is called with the requests done and to be done.
    """
    require_choice("trace", trace, tuple(TRACES))
    require_choice("ids", ids, ("list", "array"))
    capacity_tokens = require_int("capacity_tokens", capacity_tokens, page_size)
    if num_requests is None:
        requests = list(TRACES[trace](seed=seed))
    else:
        require_int("num_requests", num_requests, 1)
        requests = list(TRACES[trace](num_requests, seed=seed))
    convert: Callable[[TokenIds], Any] = (lambda a: a.tolist()) if ids == "list" else (lambda a: a)
    given = [(convert(r.prompt), convert(r.whole)) for r in requests]
    cache = make_cache(capacity_tokens, page_size, eviction)
    times = np.empty(len(given))
    matched = 0
    gc.collect()
    for i, (prompt, whole) in enumerate(given):
        start = time.perf_counter()
        matched += request(cache, prompt, whole)
        times[i] = time.perf_counter() - start
        tell(i + 1, len(given))
    stats = cache.stats()
    baseline_us = baseline_matched = None
    if baseline:
        brute = BruteForce(capacity_tokens)
        start = time.perf_counter()
        baseline_matched = sum(brute.request(prompt, whole) for prompt, whole in given)
        baseline_us = (time.perf_counter() - start) / len(given) * 1e6
    return TraceResult(
        trace=trace,
        ids=ids,
        num_requests=len(given),
        mean_tokens=float(np.mean([r.whole.size for r in requests])),
        us_mean=float(times.mean() * 1e6),
        us_p50=float(np.percentile(times, 50) * 1e6),
        us_p99=float(np.percentile(times, 99) * 1e6),
        tokens_matched=matched,
        hit_rate=matched / sum(r.prompt.size for r in requests),
        baseline_us_mean=baseline_us,
        baseline_tokens_matched=baseline_matched,
        evicted_pages=stats.evicted_pages,
        nodes=stats.nodes,
        host_bytes_per_token=(
            host_bytes_per_token(requests, capacity_tokens, page_size) if measure_memory else None
        ),
    )


def host_bytes_per_token(
    requests: Sequence[Request], capacity_tokens: int, page_size: int
) -> float:
    """Host memory that the tree takes a cached token after ``requests``, pool arrays included."""

    def fill(some: Sequence[Request]) -> PrefixCache:
        cache = make_cache(capacity_tokens, page_size)
        for r in some:
            request(cache, r.prompt, r.whole)
        gc.collect()
        return cache

    tracemalloc.start()
    try:
        fill(requests[:32])  # what a process makes once, as when kernels were compiled in it
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        cache = fill(requests)
        used = tracemalloc.get_traced_memory()[0] - before
        return used / max(1, cache.tree.num_tokens)
    finally:
        tracemalloc.stop()


@dataclass(frozen=True, kw_only=True)
class GrowthResult:
    """What one step costs in a tree of some size, in processor time.

    Attributes:
        nodes: runs in the tree: leaves of one page each below 1,000 shared pages.
        match_us: microseconds of `PrefixCache.match` of the same 1,440 tokens, median.
        evict_us: microseconds of `PrefixCache.evict` of one page, median.
        evict_batch_us: microseconds a page where 100 go in one call, median.
        host_bytes_per_token: host memory of the tree a cached token.
    """

    nodes: int
    match_us: float
    evict_us: float
    evict_batch_us: float
    host_bytes_per_token: float


def _median_us(action: Callable[[], object], count: int) -> float:
    times = np.empty(count)
    for i in range(count):
        start = time.thread_time()
        action()
        times[i] = time.thread_time() - start
    return float(np.median(times) * 1e6)


def run_growth(num_nodes: int, *, page_size: int = 16, seed: int = 0) -> GrowthResult:
    """Grow a tree of ``num_nodes`` one-page leaves; time a match and evictions in it."""
    require_int("num_nodes", num_nodes, 10)
    random = np.random.default_rng(seed)
    whole = random.integers(0, VOCABULARY, 1440)
    parents = min(1000, num_nodes)
    num_pages = num_nodes + parents + -(-whole.size // page_size)
    cache = make_cache(num_pages * page_size, page_size)
    tree = cache.tree
    shared = random.integers(0, VOCABULARY, (parents, page_size))

    def put(tokens: Tokens) -> None:
        # Without a lease: a million of them would be most of the time.
        pages, _, _ = tree.acquire(tokens, tokens.size)
        tree.insert(tokens, pages)
        tree.pool.drop(pages)

    for start in range(0, num_nodes, 10_000):
        own = random.integers(0, VOCABULARY, (min(10_000, num_nodes - start), page_size))
        above = shared[np.arange(start, start + len(own)) % parents]
        for tokens in np.hstack([above, own]).astype(np.int32):
            put(tokens)
    put(tree.encode(whole))
    nodes, num_tokens = tree.num_nodes, tree.num_tokens
    match_us = _median_us(lambda: cache.match(whole), 300)
    many = max(1, min(100, num_nodes // 100))
    return GrowthResult(
        nodes=nodes,
        match_us=match_us,
        evict_us=_median_us(lambda: cache.evict(page_size), min(300, num_nodes // 4)),
        evict_batch_us=_median_us(lambda: cache.evict(many * page_size), 50) / many,
        host_bytes_per_token=(tree.pool.nbytes + cache.core.pins.counts.nbytes) / num_tokens,
    )


def growth(page_size: int = 16) -> dict[str, Any]:
    """`run_growth` at 10,000 and 1,000,000 nodes, and `run_turns` in tenths of 500 turns."""
    sizes = [asdict(run_growth(n, page_size=page_size)) for n in (10_000, 1_000_000)]
    turns = np.array(run_turns(500, page_size=page_size)).reshape(10, 50)
    return {"sizes": sizes, "turn_us": np.median(turns, axis=1).round(1).tolist()}


def run_turns(num_turns: int, *, page_size: int = 16, new_tokens: int = 50) -> list[float]:
    """Microseconds of processor time of each turn of one agent that goes on with its lease."""
    cache = make_cache((num_turns + 2) * new_tokens, page_size)
    random = np.random.default_rng(0)
    times = []
    with cache.acquire(random.integers(0, VOCABULARY, new_tokens)) as lease:
        for _ in range(num_turns):
            more = random.integers(0, VOCABULARY, new_tokens)
            start = time.thread_time()
            lease.extend(more)
            lease.commit(lease.num_tokens)
            times.append((time.thread_time() - start) * 1e6)
    return times


def hardware() -> str:
    """The processor that numbers were measured on."""
    return f"{num_cpus()} x {processor_name()}"
