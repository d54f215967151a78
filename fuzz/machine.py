"""Hypothesis drives a `World`: every rule is one operation, everything compared after each."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from fuzz.driver import NAMESPACES, PAGE_SIZES
from fuzz.world import Held, Pinned, Tokens, World

namespaces = st.sampled_from(NAMESPACES)
small = st.integers(0, 40)
layers = st.integers(0, 1)
ttls = st.sampled_from([None, None, 1.0, 3.0])


class CacheMachine(RuleBasedStateMachine):
    """Leases and pins over a few pages, against the brute-force model."""

    sequences: Bundle[Tokens] = Bundle("sequences")

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        num_pages=st.integers(2, 12),
        eviction=st.sampled_from(["lru", "lfu", "priority"]),
        pin_share=st.sampled_from([0.3, 0.6, 1.0]),
        twins=st.booleans(),
    )
    def start(
        self, page_size: int, num_pages: int, eviction: str, pin_share: float, twins: bool
    ) -> None:
        self.world = World(page_size, num_pages, eviction, pin_share, twins)

    def held(self, index: int) -> Held:
        return self.world.leases[index % len(self.world.leases)]

    def pinned(self, index: int) -> Pinned:
        return self.world.pins[index % len(self.world.pins)]

    @rule(target=sequences, tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def fresh_sequence(self, tokens: list[int]) -> Tokens:
        return tuple(tokens)

    @rule(
        target=sequences,
        begin=sequences,
        keep=small,
        more=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    )
    def branch_sequence(self, begin: Tokens, keep: int, more: list[int]) -> Tokens:
        return begin[:keep] + tuple(more)

    @rule(tokens=sequences, namespace=namespaces, full=st.booleans())
    def acquire(self, tokens: Tokens, namespace: object, full: bool) -> None:
        self.world.acquire(namespace, tokens, full)

    @rule(tokens=sequences, namespace=namespaces)
    def use_once(self, tokens: Tokens, namespace: object) -> None:
        """Acquire, write, commit, release: the way of most users."""
        held = self.world.acquire(namespace, tokens)
        if held is not None:
            for layer in range(2):
                self.world.write(held, layer)
            self.world.commit(held)
            self.world.release(held)

    @rule(tokens=sequences, namespace=namespaces)
    def match(self, tokens: Tokens, namespace: object) -> None:
        self.world.match(namespace, tokens)

    @precondition(lambda self: self.world.leases)
    @rule(index=small, layer=layers)
    def write(self, index: int, layer: int) -> None:
        self.world.write(self.held(index), layer)

    @precondition(lambda self: self.world.leases)
    @rule(index=small)
    def write_slots(self, index: int) -> None:
        self.world.write_slots(self.held(index))

    @precondition(lambda self: self.world.leases)
    @rule(index=small, tokens=sequences, count=small)
    def extend(self, index: int, tokens: Tokens, count: int) -> None:
        self.world.extend(self.held(index), tokens[:count])

    @precondition(lambda self: 0 < len(self.world.leases) < 8)
    @rule(index=small)
    def fork(self, index: int) -> None:
        self.world.fork(self.held(index))

    @precondition(lambda self: self.world.leases)
    @rule(index=small, count=small)
    def truncate(self, index: int, count: int) -> None:
        held = self.held(index)
        self.world.truncate(held, min(count, len(held.tokens)))

    @precondition(lambda self: self.world.leases)
    @rule(
        index=small,
        count=st.none() | small,
        priority=st.sampled_from([None, 0, 1, 5]),
        ttl=ttls,
    )
    def commit(self, index: int, count: int | None, priority: int | None, ttl: Any) -> None:
        self.world.commit(self.held(index), count, priority, ttl)

    @precondition(lambda self: self.world.leases)
    @rule(index=small)
    def release(self, index: int) -> None:
        self.world.release(self.held(index))

    @precondition(lambda self: self.world.leases)
    @rule(index=small)
    def abandon(self, index: int) -> None:
        self.world.abandon(self.held(index))

    @rule(tokens=sequences, namespace=namespaces, ttl=ttls)
    def pin(self, tokens: Tokens, namespace: object, ttl: float | None) -> None:
        self.world.pin(namespace, tokens, ttl)

    @precondition(lambda self: self.world.pins)
    @rule(index=small)
    def unpin(self, index: int) -> None:
        self.world.unpin(self.pinned(index))

    @rule(seconds=st.sampled_from([1.0, 2.0]))
    def expire(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(count=small)
    def evict(self, count: int) -> None:
        self.world.evict(count)

    @rule(namespace=namespaces)
    def clear(self, namespace: object) -> None:
        self.world.clear(namespace)

    @rule(tokens=consumes(sequences))
    def forget_sequence(self, tokens: Tokens) -> None:
        """Keeps the pool of sequences small."""

    @invariant()
    def equals_the_model(self) -> None:
        if hasattr(self, "world"):
            self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
