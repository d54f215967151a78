"""Turn numbers into operations on a `World`: seeded ones, or bytes that a fuzzer mutates."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz.world import Tokens, World

NAMESPACES = (None, "tenant", 7)
PAGE_SIZES = (1, 2, 4, 8, 16, 64)


class Bytes:
    """A source of small numbers: bytes while they last, then zeros."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def below(self, limit: int) -> int:
        value = self.data[self.at] if self.at < len(self.data) else 0
        self.at += 1
        return value % limit

    @property
    def done(self) -> bool:
        return self.at >= len(self.data)


class Seeded:
    """The same numbers from a seed."""

    done = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def below(self, limit: int) -> int:
        return self.random.randrange(limit)


Source = Bytes | Seeded


class Driver:
    """One world, one source of numbers, one operation a step."""

    def __init__(self, source: Source, *, twins: bool = False) -> None:
        self.source = source
        self.page_size = PAGE_SIZES[source.below(len(PAGE_SIZES))]
        self.alphabet = 2 + source.below(3)
        self.world = World(
            page_size=self.page_size,
            num_pages=3 + source.below(14),
            eviction=("lru", "lru", "lfu", "priority")[source.below(4)],
            pin_share=(0.3, 0.6, 1.0)[source.below(3)],
            twins=twins,
        )
        self.known: list[Tokens] = []

    def tokens(self) -> Tokens:
        """A short sequence that often begins as one that was used before."""
        below = self.source.below
        start: Tokens = ()
        if self.known and below(4):
            start = self.known[below(len(self.known))]
            start = start[: below(len(start) + 1)] if below(2) else start
        longest = max(3, min(3 * self.page_size + 2, 70))
        start += tuple(below(self.alphabet) for _ in range(below(longest)))
        most = self.page_size * (self.world.num_pages + 1)
        start = start[:most] or (below(self.alphabet),)
        if len(self.known) < 12:
            self.known.append(start)
        else:
            self.known[below(12)] = start
        return start

    def step(self) -> None:
        """Do one operation and compare everything."""
        below, world = self.source.below, self.world
        operations: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: self.acquire(whole=False)),
            (8, lambda: self.acquire(whole=True)),
            (2, lambda: world.match(self.namespace(), self.tokens())),
            (2, lambda: world.pin(self.namespace(), self.tokens(), self.ttl())),
            (2, lambda: world.evict(below(4 * self.page_size))),
            (2, lambda: world.advance(below(3))),
        ]
        if world.leases:
            held = world.leases[below(len(world.leases))]
            operations += [
                (6, lambda: world.write(held, below(2))),
                (3, lambda: world.write_slots(held)),
                (6, lambda: world.extend(held, self.tokens()[: below(2 * self.page_size + 2)])),
                (3, lambda: world.fork(held)),
                (2, lambda: world.truncate(held, below(len(held.tokens) + 1))),
                (7, lambda: world.commit(held, None, self.priority(), self.ttl())),
                (2, lambda: world.commit(held, below(len(held.tokens) + 1))),
                (5 + 2 * len(world.leases), lambda: world.release(held)),
                (1, lambda: world.abandon(held)),
            ]
        if world.pins:
            pinned = world.pins[below(len(world.pins))]
            operations.append((3, lambda: world.unpin(pinned)))
        if below(24) == 0:
            operations.append((20, lambda: world.clear(self.namespace())))
        if below(64) == 0:
            operations.append((30, world.clear))
        at = below(min(256, sum(weight for weight, _ in operations)))
        for weight, operation in operations:
            if at < weight:
                operation()
                break
            at -= weight
        world.verify()
        world.match(self.namespace(), self.tokens())

    def namespace(self) -> object:
        return NAMESPACES[max(0, self.source.below(6) - 3)]

    def ttl(self) -> float | None:
        return (None, None, 1.0, 3.0)[self.source.below(4)]

    def priority(self) -> int | None:
        return (None, 0, 1, 5)[self.source.below(4)]

    def acquire(self, whole: bool) -> None:
        """Acquire; with ``whole`` write, commit and often release at once, as users do."""
        world, below = self.world, self.source.below
        held = world.acquire(self.namespace(), self.tokens(), full=below(4) == 0)
        if held is None or not whole:
            return
        world.verify()
        for layer in range(2):
            world.write(held, layer)
        if min(held.written) == len(held.tokens):
            world.verify()
            world.commit(held)
        if below(3):
            world.verify()
            world.release(held)


def run_bytes(data: bytes) -> None:
    """Run the operations that ``data`` stands for, then give everything back."""
    source = Bytes(data)
    driver = Driver(source)
    while not source.done:
        driver.step()
    driver.world.close()


def run_seed(seed: int, steps: int) -> int:
    """Run ``steps`` operations from a seed; returns how many comparisons were made.

    Every fourth seed runs both trees side by side, the others the compiled one where Numba is.
    """
    driver = Driver(Seeded(seed), twins=seed % 4 == 3)
    for _ in range(steps):
        driver.step()
    driver.world.close()
    return driver.world.steps
