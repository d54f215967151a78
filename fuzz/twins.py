"""The compiled tree and the plain one side by side: same calls, same answers, same evictions.

    python -m fuzz.twins --steps 20000

runs so many operations under each eviction policy and page size, on two caches that differ in
their tree alone. After each one everything that they say of themselves is compared, to the page
id, and each tree is checked. What the answers should be is the model's business (`world.py`);
here pools are larger than it could follow, and more is asked: explanations, pictures, snapshots.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz.driver import NAMESPACES, Bytes, Seeded, Source
from radixkv.cache import Lease, Pin, PrefixCache
from radixkv.compiled_tree import CompiledTree
from radixkv.config import EVICTIONS, KVConfig
from radixkv.errors import CapacityError
from radixkv.plain_tree import PlainTree
from radixkv.quant import KVSpec
from radixkv.radix import RadixTree, encode_tokens

PAGE_SIZES = (1, 4, 16, 64)
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1)
ROW_BYTES = 8  # of a token: K and V in float32
LONGEST = 400  # tokens of a sequence
Tokens = tuple[int, ...]


def make_cache(page_size: int, num_pages: int, eviction: str, *, plain: bool) -> PrefixCache:
    """A cache on the one tree or the other."""
    before = os.environ.get("RADIXKV_PLAIN_TREE", "0")
    os.environ["RADIXKV_PLAIN_TREE"] = str(int(plain))
    try:
        capacity = num_pages * page_size * ROW_BYTES
        config = KVConfig(
            dtype="model", page_size=page_size, capacity=capacity, eviction=eviction, pin_share=0.6
        )
        cache = PrefixCache(SPEC, config, backend="torch")
    finally:
        os.environ["RADIXKV_PLAIN_TREE"] = before
    assert type(cache.tree) is (PlainTree if plain else CompiledTree)
    return cache


class Twins:
    """Two caches, and operations on both, drawn from a source of numbers."""

    def __init__(self, source: Source, page_size: int, eviction: str) -> None:
        self.source = source
        self.page_size = page_size
        self.num_pages = 3 + source.below(16) * source.below(6)
        self.alphabet = 2 + source.below(3)
        self.eviction = eviction
        self.now = 0.0
        self.leases: list[tuple[Lease, Lease]] = []
        self.pins: list[tuple[Pin, Pin]] = []
        self.known: list[Tokens] = []
        self.renew()

    def renew(self) -> None:
        """Two empty caches."""
        self.caches = tuple(
            make_cache(self.page_size, self.num_pages, self.eviction, plain=plain)
            for plain in (False, True)
        )
        for cache in self.caches:
            cache._now = lambda: self.now

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

    def both(self, call: Callable[[Any], Any], pair: tuple[Any, ...] | None = None) -> Any:
        """The call's value for each of the two; both raise the same error or neither does."""
        values, errors = [], []
        for one in self.caches if pair is None else pair:
            try:
                values.append(call(one))
                errors.append(None)
            except CapacityError as error:
                errors.append(str(error))
        assert errors[0] == errors[1], errors
        return tuple(values) if values else None

    def equal(self, call: Callable[[Any], Any], pair: tuple[Any, ...] | None = None) -> Any:
        """As `both`; the values are equal, and one is returned."""
        values = self.both(call, pair)
        if values is None:
            return None
        assert values[0] == values[1], values
        return values[0]

    def step(self) -> None:
        """Do one operation; compare everything."""
        below = self.source.below
        operations: list[tuple[int, Callable[[], object]]] = [
            (8, lambda: self.acquire(whole=False)),
            (20, lambda: self.acquire(whole=True)),
            (3, self.pin),
            (3, lambda: self.evict(below(6 * self.page_size))),
            (2, lambda: self.advance(below(3))),
            (3, self.look),
        ]
        if self.leases:
            pair = self.leases[below(len(self.leases))]
            size = pair[0].num_tokens
            operations += [
                (8, lambda: self.extend(pair, self.tokens()[: below(2 * self.page_size + 2)])),
                (4, lambda: self.leases.append(self.both(lambda lease: lease.fork(), pair))),
                (2, lambda: self.cut(pair, below(size + 1))),
                (6, lambda: self.commit(pair, size)),
                (3, lambda: self.commit(pair, below(size + 1))),
                (3, lambda: self.own(pair)),
                (6 + 2 * len(self.leases), lambda: self.release(pair)),
            ]
        if self.pins:
            pins = self.pins[below(len(self.pins))]
            operations.append((4, lambda: self.unpin(pins)))
        if below(24) == 0:
            operations.append((20, lambda: self.clear(self.namespace())))
        if below(100) == 0:
            operations.append((50, self.save_and_load))
        at = below(min(256, sum(weight for weight, _ in operations)))
        for weight, operation in operations:
            if at < weight:
                operation()
                break
            at -= weight
        self.compare()

    def acquire(self, whole: bool) -> None:
        """Acquire; with ``whole`` commit, and often release at once, as users do."""
        below = self.source.below
        tokens, namespace, full = self.tokens(), self.namespace(), below(4) == 0
        pair = self.both(lambda cache: cache.acquire(tokens, namespace=namespace, full=full))
        if pair is None:
            return
        self.leases.append(pair)
        self.equal(lambda lease: (lease.num_cached, lease.page_ids.tolist()), pair)
        if whole:
            self.compare()
            self.commit(pair, len(tokens))
            if below(4):
                self.compare()
                self.release(pair)

    def extend(self, pair: tuple[Lease, Lease], tokens: Tokens) -> None:
        if pair[0].num_tokens + len(tokens) <= LONGEST:
            self.equal(lambda lease: lease.extend(tokens), pair)

    def cut(self, pair: tuple[Lease, Lease], num_tokens: int) -> None:
        self.equal(lambda lease: lease.truncate(num_tokens), pair)

    def commit(self, pair: tuple[Lease, Lease], num_tokens: int) -> None:
        """Publish, with a priority and a time; of a shared page its own copy, as a writer has."""
        priority, ttl = self.priority(), self.ttl()
        if pair[0].num_written < num_tokens:
            self.own(pair)
        if pair[0].num_written >= num_tokens:
            self.equal(lambda lease: lease.commit(num_tokens, priority=priority, ttl=ttl), pair)
        if num_tokens and pair[0].num_written >= num_tokens:
            self.equal(lambda cache: cache.tree.end_page)

    def own(self, pair: tuple[Lease, Lease]) -> None:
        """Say that all is written: pages that others own too are copied first, or it fails."""
        slots = self.both(lambda lease: lease.slot_mapping.tolist(), pair)
        if slots is not None:
            assert slots[0] == slots[1]
            self.equal(lambda lease: lease.mark_written(), pair)

    def release(self, pair: tuple[Lease, Lease]) -> None:
        self.equal(lambda lease: lease.release(), pair)
        self.leases.remove(pair)

    def pin(self) -> None:
        tokens, namespace, ttl = self.tokens(), self.namespace(), self.ttl()
        pair = self.both(lambda cache: cache.pin(tokens, namespace, ttl=ttl))
        if pair is not None:
            self.equal(lambda pin: pin.num_tokens, pair)
            self.pins.append(pair)

    def unpin(self, pair: tuple[Pin, Pin]) -> None:
        self.equal(lambda pin: pin.unpin(), pair)
        self.pins.remove(pair)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.pins = [pair for pair in self.pins if self.equal(lambda pin: pin.is_active, pair)]

    def evict(self, num_tokens: int) -> None:
        self.equal(lambda cache: cache.evict(num_tokens))

    def clear(self, namespace: object) -> None:
        self.equal(lambda cache: cache.clear(namespace))
        self.pins = [pair for pair in self.pins if pair[0].is_active]

    def look(self) -> None:
        """What changes nothing: a match to the page, explanations, pictures."""
        tokens, namespace = self.tokens(), self.namespace()
        self.equal(lambda cache: cache.explain(tokens, namespace))

        def match(cache: PrefixCache) -> tuple[int, list[int], bool]:
            found = cache.tree.match(encode_tokens(tokens), namespace)
            return found.num_tokens, found.page_ids.tolist(), found.in_part

        self.equal(match)
        self.equal(lambda cache: cache.render())
        with tempfile.TemporaryDirectory() as folder:

            def page(cache: PrefixCache) -> str:
                cache.to_html(Path(folder) / "tree.html")
                return (Path(folder) / "tree.html").read_text()

            self.equal(page)

    def save_and_load(self) -> None:
        """Both write the same file; it is loaded into new ones of another size, and used on."""
        prefixes = [self.tokens(), self.tokens()] if self.source.below(3) == 0 else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"

            def save(cache: PrefixCache) -> bytes:
                cache.save(path, prefixes=prefixes)
                return path.read_bytes()

            self.equal(save)
            while self.leases:
                self.release(self.leases[-1])
            self.pins = []
            self.num_pages = 3 + self.source.below(16) * self.source.below(6)
            self.renew()
            self.equal(lambda cache: cache.load(path))

    # --- the comparison ----------------------------------------------------------------

    def compare(self) -> None:
        """Raise AssertionError where the two differ, or one's own check fails."""
        self.equal(lambda cache: cache.check())
        self.equal(lambda cache: dump(cache.tree))
        self.equal(lambda cache: cache.stats())
        self.equal(lambda cache: cache.pool.ref_count.tolist())
        self.equal(lambda cache: cache.pool.in_tree.tolist())
        self.equal(lambda cache: cache.pool.stand_ins())
        self.equal(lambda cache: (cache.pool.num_free, cache.pool.num_evictable))
        self.equal(lambda cache: (cache.tree.clock, cache.tree.room))
        for pair in self.leases:
            self.equal(lambda lease: lease.page_ids.tolist(), pair)

    def close(self) -> None:
        """Give everything back; then both hand out all pages in the same order."""
        while self.leases:
            self.release(self.leases[-1])
        while self.pins:
            self.unpin(self.pins[-1])
        self.compare()
        self.evict(10**6)
        self.compare()
        self.equal(lambda cache: cache.pool.allocate(cache.pool.num_free).tolist())
        assert self.caches[0].num_free_pages == 0


def dump(tree: RadixTree) -> list[tuple[object, ...]]:
    """Every page of a tree: where it hangs, what it holds, and when it goes."""
    out: list[tuple[object, ...]] = []
    for root in tree.roots.values():
        out.append((root.namespace, tree.held_below(root)))
        stack = [(0, page) for page in tree.child_pages(root.last_page)]
        while stack:
            parent, page = stack.pop()
            below = tree.child_pages(page)
            tokens = tree.tokens_of(page)
            assert tokens.dtype == np.int32
            out.append(
                (parent, page, tokens.tolist(), tree.policy_key(page), tree.expires_of(page), below)
            )
            stack += [(page, child) for child in below]
    return out


def run_bytes(data: bytes) -> None:
    """Run the operations that ``data`` stands for, then give everything back."""
    source = Bytes(data)
    eviction = EVICTIONS[source.below(len(EVICTIONS))]
    twins = Twins(source, PAGE_SIZES[source.below(len(PAGE_SIZES))], eviction)
    while not source.done:
        twins.step()
    twins.close()


def run_seed(seed: int, page_size: int, eviction: str, steps: int) -> None:
    """Run ``steps`` operations from a seed, on new caches after each 200 of them."""
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
