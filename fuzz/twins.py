"""The plain tree and the compiled one side by side: same calls, same answers, same evictions.

    python -m fuzz.twins --steps 20000

runs so many operations under each eviction policy and page size, on two caches that differ in
their tree alone. After each one everything that they say of themselves is compared, to the page
id, and each tree is checked. What the answers should be is the model's business (`world.py`);
here pools are larger than it could follow, and more is asked: explanations, pictures, snapshots.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fuzz.driver import NAMESPACES, Bytes, Seeded, Source
from fuzz.mirror import Mirror, compare, mirrored_cache
from radixkv.attention.layout import KVSpec
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tree import encode_tokens
from radixkv.config import EVICTIONS, KVConfig
from radixkv.errors import CapacityError

PAGE_SIZES = (1, 4, 16, 64)
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1)
ROW_BYTES = 8  # of a token: K and V in float32
LONGEST = 400  # tokens of a sequence
Tokens = tuple[int, ...]


class Twins:
    """Operations on a mirrored cache, drawn from a source of numbers."""

    def __init__(self, source: Source, page_size: int, eviction: str) -> None:
        self.source = source
        self.page_size = page_size
        self.alphabet = 2 + source.below(3)
        self.eviction = eviction
        self.now = 0.0
        self.known: list[Tokens] = []
        self.renew()

    def renew(self) -> None:
        """An empty cache of another size."""
        num_pages = 3 + self.source.below(16) * self.source.below(6)
        config = KVConfig(
            dtype="model",
            page_size=self.page_size,
            capacity=num_pages * self.page_size * ROW_BYTES,
            eviction=self.eviction,
            pin_share=0.6,
        )
        self.cache = mirrored_cache(SPEC, config)
        assert isinstance(self.cache, Mirror), "the compiled tree needs Numba"
        self.cache.core.now = lambda: self.now
        # Every lease is given back here, and a collection takes as long as a thousand steps.
        self.cache.core.collect_garbage = lambda: False
        for cache in self.cache.pair:  # nothing is written here, and both save the same
            for stored in cache.storage.pages:
                stored.zero_()
        self.leases: list[Any] = []
        self.pins: list[Any] = []

    # --- what is drawn -----------------------------------------------------------------

    def tokens(self) -> Tokens:
        """A sequence that often begins as one that was used before, sometimes a long one."""
        below = self.source.below
        start: Tokens = ()
        if self.known and below(5):
            start = self.known[below(len(self.known))]
            start = start[: below(len(start) + 1)] if below(3) == 0 else start
        longest = min(self.page_size * (2 + below(3)) + 2, 150)
        start += tuple(below(self.alphabet) for _ in range(below(longest)))
        start = start[:LONGEST] or (below(self.alphabet),)
        if len(self.known) < 24:
            self.known.append(start)
        else:
            self.known[below(24)] = start
        return start

    def namespace(self) -> object:
        return NAMESPACES[max(0, self.source.below(6) - 3)]

    def ttl(self) -> float | None:
        return (None, None, 1.0, 3.0)[self.source.below(4)]

    def priority(self) -> int | None:
        return (None, 0, 1, 5, -3)[self.source.below(5)]

    # --- operations --------------------------------------------------------------------

    def step(self) -> None:
        """Do one operation, which may find no room; compare everything."""
        below = self.source.below
        operations: list[tuple[int, Callable[[], object]]] = [
            (8, self.acquire),
            (20, self.use_once),
            (3, self.pin),
            (3, lambda: self.cache.evict(below(6 * self.page_size))),
            (2, lambda: self.advance(below(3))),
            (3, self.look),
        ]
        if self.leases:
            lease = self.leases[below(len(self.leases))]
            operations += [
                (8, lambda: self.extend(lease, self.tokens()[: below(2 * self.page_size + 2)])),
                (4, lambda: self.leases.append(lease.fork())),
                (2, lambda: lease.truncate(below(lease.num_tokens + 1))),
                (6, lambda: self.commit(lease, lease.num_tokens)),
                (3, lambda: self.commit(lease, below(lease.num_tokens + 1))),
                (3, lambda: self.write(lease)),
                (6 + 2 * len(self.leases), lambda: self.release(lease)),
            ]
        if self.pins:
            pin = self.pins[below(len(self.pins))]
            operations.append((4, pin.unpin))
        if below(24) == 0:
            operations.append((20, lambda: self.cache.clear(self.namespace())))
        if below(100) == 0:
            operations.append((50, self.save_and_load))
        at = below(min(256, sum(weight for weight, _ in operations)))
        for weight, operation in operations:
            if at < weight:
                with contextlib.suppress(CapacityError):  # of both: the mirror sees to it
                    operation()
                break
            at -= weight
        self.pins = [pin for pin in self.pins if pin.is_active]
        compare(self.cache)

    def acquire(self) -> Any:
        tokens, namespace, full = self.tokens(), self.namespace(), self.source.below(4) == 0
        lease = self.cache.acquire(tokens, namespace=namespace, full=full)
        self.leases.append(lease)
        assert 0 <= lease.num_cached <= lease.num_tokens == len(tokens)
        assert len(lease.page_ids) == -(-len(tokens) // self.page_size)
        return lease

    def use_once(self) -> None:
        """Acquire, commit, often release at once, as users do."""
        lease = self.acquire()
        compare(self.cache)
        self.commit(lease, lease.num_tokens)
        if self.source.below(4):
            compare(self.cache)
            self.release(lease)

    def extend(self, lease: Any, tokens: Tokens) -> None:
        if lease.num_tokens + len(tokens) <= LONGEST:
            lease.extend(tokens)

    def write(self, lease: Any) -> None:
        """Say that all is written: pages that others own too are copied first."""
        assert lease.slot_mapping is not None
        lease.mark_written()

    def commit(self, lease: Any, num_tokens: int) -> None:
        if lease.num_written < num_tokens:
            self.write(lease)
        lease.commit(num_tokens, priority=self.priority(), ttl=self.ttl())
        assert len(lease.page_ids) == -(-lease.num_tokens // self.page_size)

    def release(self, lease: Any) -> None:
        lease.release()
        self.leases.remove(lease)

    def pin(self) -> None:
        self.pins.append(self.cache.pin(self.tokens(), self.namespace(), ttl=self.ttl()))

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> None:
        """What changes nothing: a match to the page, explanations, pictures."""
        tokens, namespace = self.tokens(), self.namespace()
        self.cache.explain(tokens, namespace)

        def match(cache: PrefixCache) -> tuple[int, list[int], bool]:
            found = cache.tree.match(encode_tokens(tokens), namespace)
            return found.num_tokens, found.page_ids.tolist(), found.in_part

        self.cache.ask(match)
        self.cache.render()
        with tempfile.TemporaryDirectory() as folder:

            def page(cache: PrefixCache) -> str:
                cache.to_html(Path(folder) / "tree.html")
                return (Path(folder) / "tree.html").read_text()

            self.cache.ask(page)

    def save_and_load(self) -> None:
        """Both write the same file; it is loaded into new ones of another size, and used on."""
        prefixes = [self.tokens(), self.tokens()] if self.source.below(3) == 0 else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"

            def save(cache: PrefixCache) -> bytes:
                cache.save(path, prefixes=prefixes)
                return path.read_bytes()

            self.cache.ask(save)
            while self.leases:
                self.release(self.leases[-1])
            self.renew()
            self.cache.load(path)

    def close(self) -> None:
        """Give everything back; then both hand out all pages in the same order."""
        while self.leases:
            self.release(self.leases[-1])
        for pin in self.pins:
            pin.unpin()
        compare(self.cache)
        self.cache.evict(10**6)
        compare(self.cache)
        self.cache.ask(lambda cache: cache.pool.allocate(cache.pool.num_free))
        assert self.cache.num_free_pages == 0


def run_bytes(data: bytes) -> None:
    """Run the operations that ``data`` stands for, then give everything back."""
    source = Bytes(data)
    eviction = EVICTIONS[source.below(len(EVICTIONS))]
    twins = Twins(source, PAGE_SIZES[source.below(len(PAGE_SIZES))], eviction)
    while not source.done:
        twins.step()
    twins.close()


def run_seed(seed: int, page_size: int, eviction: str, steps: int) -> None:
    """Run ``steps`` operations from a seed, on a new cache after each 200 of them."""
    source = Seeded(seed)
    for first in range(0, steps, 200):
        twins = Twins(source, page_size, eviction)
        for _ in range(min(200, steps - first)):
            twins.step()
        twins.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.twins", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="under each policy and page size")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for eviction, page_size in itertools.product(EVICTIONS, PAGE_SIZES):
        try:
            run_seed(args.seed, page_size, eviction, args.steps)
        except Exception:
            traceback.print_exc()
            print(f"\n{eviction}, pages of {page_size}, seed {args.seed}: differ", file=sys.stderr)
            return 1
        print(f"{eviction}, pages of {page_size}: {args.steps} steps, no difference", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
