"""Make anything fail at its k-th call: `python -m fuzz.faults`.

A load runs once to count the calls of every *point* (allocations, kernels, the model, the
tokenizer, the sampler, callbacks, writes to disk). Then it runs again for every k, and the k-th
call raises; and again with two calls in a row, so that what is tried again fails too. Each time:
no more requests fail than faults were raised, each with the fault itself as its error; all others
give what they give alone; sums hold, `check()` passes, no page is left, the next request is right.

A point is a place that is replaced while the harness runs; `points` lists them. A module that
writes files adds its own there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fuzz.tiny import make_model, make_tokenizer
from radixkv import BeamParams, Engine, KVConfig, SamplingParams

_RETRIES = 4  # of a call that a fault ended; one fault is at most two calls in a row


class FaultError(RuntimeError):
    """Raised at a chosen call."""


class MemoryFaultError(MemoryError):
    """The same, as an allocation says it."""


FAULTS = (FaultError, MemoryFaultError)


class Faults:
    """Counts the calls of all points, and raises where `decide` says so.

    Attributes:
        calls: how often each point was called.
        total: calls of all points.
        raised: the faults so far.
        decide: told point and total; whether this call fails.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.total = 0
        self.raised: list[Exception] = []
        self.decide: Callable[[str, int], bool] = lambda name, total: False
        self.active = True

    def hit(self, name: str) -> None:
        """Count a call of a point, and raise if it is to fail."""
        if not self.active:
            return
        self.calls[name] += 1
        self.total += 1
        if self.decide(name, self.total):
            kind = FAULTS[len(self.raised) % len(FAULTS)]
            error = kind(f"fault at call {self.total}: {name}")
            self.raised.append(error)
            raise error

    def arm(self, first: int = 0, count: int = 0) -> None:
        """Start counting anew; calls ``first`` to ``first + count - 1`` are to fail."""
        self.calls.clear()
        self.raised.clear()
        self.total = 0
        self.decide = lambda name, total: first <= total < first + count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither count nor raise within this block."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    @contextmanager
    def installed(self, places: list[tuple[str, Any, str]]) -> Iterator[None]:
        """Within this block, each ``(name, owner, attribute)`` of ``places`` is a point."""
        before = []
        try:
            for name, owner, attribute in places:
                original = getattr(owner, attribute)
                before.append((owner, attribute, vars(owner).get(attribute)))
                setattr(owner, attribute, self.wrap(name, original))
            yield
        finally:
            for owner, attribute, original in reversed(before):
                if original is None:
                    delattr(owner, attribute)  # it was the class's
                else:
                    setattr(owner, attribute, original)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which counts as a call of ``name`` first."""

        def point(*args: Any, **keywords: Any) -> Any:
            self.hit(name)
            return function(*args, **keywords)

        return point


def points(tokenizer: Any, model: Any) -> list[tuple[str, Any, str]]:
    """Every place that is made to fail: (name, owner, attribute)."""
    import rich.progress

    from radixkv.cache import compiled_tree, pool
    from radixkv.cache import prefix_cache as cache
    from radixkv.engine import beam, core, drawing, guided, sample_request, sampling

    kind = type(tokenizer)
    return [
        ("allocation: pages", pool.PagePool, "allocate"),
        ("allocation: copy of a page", pool.PageStorage, "copy_page"),
        ("allocation: eviction", compiled_tree.CompiledTree, "evict"),
        ("allocation: node", compiled_tree.CompiledTree, "insert"),
        ("allocation: lease", cache.PrefixCache, "try_acquire"),
        ("allocation: match", cache.PrefixCache, "match"),
        ("allocation: extend", cache.Lease, "extend_encoded"),
        ("allocation: fork", cache.Lease, "fork"),
        ("allocation: batch", core, "build_batch"),
        ("allocation: logits", drawing, "gather"),
        ("model: forward", model, "forward"),
        ("model: second layer", model.model.layers[1], "forward"),
        ("tokenizer: encode", kind, "__call__"),
        ("tokenizer: decode", kind, "decode"),
        ("tokenizer: template", kind, "apply_chat_template"),
        ("sampler: sample", drawing, "sample"),
        ("sampler: beams", beam.BeamSearch, "advance"),
        ("sampler: log-probabilities", sample_request, "top_logprobs"),
        ("sampler: masks", sampling, "allowed_tokens"),
        ("sampler: guide", guided.Guide, "advance"),
        ("callback: progress", rich.progress.Progress, "update"),
        ("disk: page of the tree", Path, "write_text"),
        ("disk: fsync", os, "fsync"),
        ("disk: rename", os, "replace"),
    ]


def add_kernels(faults: Faults, engine: Engine) -> None:
    """Make the kernels of an engine's cache points too."""
    backend: Any = engine.cache.backend
    make = backend.plan

    def plan(batch: Any) -> Any:
        made = make(batch)
        own = made.prepare

        def prepare(q: Any, *rest: Any) -> Any:
            if len(q) % 2:  # the other half goes layer by layer
                return None
            run = own(q, *rest)
            return None if run is None else faults.wrap("kernel: prepared layer", run)

        made.attend = faults.wrap("kernel: attend", made.attend)
        made.prepare = faults.wrap("kernel: prepare", prepare)
        return made

    backend.write_kv = faults.wrap("kernel: write_kv", backend.write_kv)
    backend.plan = plan


def outcome(result: Any) -> Any:
    """What must be equal of a result: tokens, text, how it ended, log-probabilities."""
    if isinstance(result, list):
        return [outcome(one) for one in result]
    if not hasattr(result, "samples"):
        return result
    samples = [(s.token_ids, s.text, s.finish_reason, s.cumulative_logprob) for s in result.samples]
    return samples, result.prompt_logprobs


def require_idle(engine: Engine) -> None:
    """Raise AssertionError unless nothing runs and every page is free or cached."""
    # A result may be had before the step that made it is at its end.
    assert engine.core.step_lock.acquire(timeout=60), "a lock that is held"
    try:
        scheduler = engine.core.scheduler
        assert not engine.core.has_requests, "a request that never ended"
        assert not scheduler.waiting and not scheduler.running, "a lost sequence"
        assert not engine.cache.core.leases, "a lease that nobody released"
        require_sums(engine)
        stats = engine.cache.stats()
        assert stats.pages_pinned == stats.pages_private == 0, stats
    finally:
        engine.core.step_lock.release()


def require_sums(engine: Engine) -> None:
    """Raise unless every page has its owners and the sums hold."""
    engine.cache.check()
    s = engine.cache.stats()
    total = s.pages_free + s.pages_cached + s.pages_pinned + s.pages_private
    assert total == s.pages_total, s


# -- loads: each gives the outcomes of its parts by name ----------------------------------------

Outcomes = dict[str, Any]
BASE = [5 + (7 * i) % 200 for i in range(13)]


class Batched:
    """Requests of several kinds at once, in a pool too small for them, stepped by hand.

    Args:
        parts: which of the requests below.
        num_pages: of the pool.
    """

    def __init__(self, faults: Faults, parts: str, num_pages: int) -> None:
        def processor(input_ids: Any, logits: Any) -> Any:
            faults.hit("callback: logits processor")
            return logits.roll(1, dims=-1)

        self.faults = faults
        self.num_pages = num_pages
        known: dict[str, tuple[Any, Any]] = {
            "greedy": (BASE, SamplingParams(temperature=0, max_new_tokens=7)),
            "samples": (
                BASE[:6],
                SamplingParams(n=2, seed=3, max_new_tokens=4, ignore_eos=True, logprobs=2),
            ),
            "processed": (
                [*BASE[:9], 7],
                SamplingParams(seed=1, max_new_tokens=2, logits_processors=[processor]),
            ),
            "beams": ([*BASE[:5], 11, 12], BeamParams(width=2, max_new_tokens=3)),
            "prompt": (
                BASE[:10],
                SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=1),
            ),
            "regex": ("on", SamplingParams(seed=5, regex="a[bc]{1,3}", max_new_tokens=4)),
            "chat": (
                [{"role": "user", "content": "in"}],
                SamplingParams(seed=2, max_new_tokens=4, stop=["zz", "q"]),
            ),
        }
        self.asked = {name: known[name] for name in parts.split()}

    def solo(self, engine: Engine) -> Outcomes:
        """Each request alone, on an empty cache."""
        found = {}
        for name, asked in self.asked.items():
            engine.cache.clear()
            found[name] = self._run(engine, {name: asked})[name]
        return found

    def run(self, engine: Engine) -> Outcomes:
        """All of them together; a request that failed has its error."""
        return self._run(engine, self.asked)

    def _run(self, engine: Engine, asked: dict[str, tuple[Any, Any]]) -> Outcomes:
        found: Outcomes = {}
        live = {}
        for name, (prompt, params) in asked.items():
            try:
                live[name] = engine.submit(prompt, params)
                live[name].listen(lambda: self.faults.hit("callback: listener"))
            except FAULTS as error:
                found[name] = error
        for _ in range(500):
            if all(request.done for request in live.values()):
                break
            engine.step()
            require_sums(engine)
        for name, request in live.items():
            assert request.done, f"{name} never ended"
            found[name] = request.error or outcome(request.result())
        return found


class Called:
    """Calls that wait for the engine's thread: each is made again until no fault ends it.

    A call that failed has changed nothing, or the next one would give something else.
    """

    num_pages = 24

    def __init__(
        self, faults: Faults, script: Callable[[Engine, Callable[..., Any]], Outcomes]
    ) -> None:
        self.faults = faults
        self.script = script

    def run(self, engine: Engine) -> Outcomes:
        """The outcomes of the script's calls."""

        def again(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            for _ in range(_RETRIES):
                try:
                    return call(*args, **keywords)
                except FAULTS:
                    with engine.core.step_lock, self.faults.paused():
                        require_sums(engine)
            raise AssertionError("failed again and again, with one fault")

        return self.script(engine, again)

    solo = run  # the same without faults


GREEDY = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)


def branches(engine: Engine, again: Callable[..., Any]) -> Outcomes:
    """Open, append, generate, fork, cut back."""
    found: Outcomes = {}
    with again(engine.open, BASE[:7]) as branch:
        again(branch.append, "on a")
        found["kept"] = outcome(again(branch.generate, GREEDY))
        twins = again(branch.fork, 2)
        again(twins[0].append, [{"role": "user", "content": "a"}])
        again(twins[1].truncate, 5)
        found["cut"] = outcome(again(twins[1].generate, GREEDY, keep=False))
        found["tokens"] = [list(b.token_ids) for b in (branch, *twins)]
        for twin in twins:
            twin.close()
    return found


def scores(engine: Engine, again: Callable[..., Any]) -> Outcomes:
    """Scores, of a branch too."""
    found: Outcomes = {"text": again(engine.score, "the in", ["on", "the"])}
    with again(engine.open, BASE[:5]) as branch:
        found["branch"] = again(branch.score, [[5, 6, 7], [8]])
    return found


def streams(engine: Engine, again: Callable[..., Any]) -> Outcomes:
    """A stream read to its end, and one that is dropped."""

    def read() -> list[Any]:
        deltas = list(engine.stream("the a", seed=4, max_new_tokens=5, stop=["zz"]))
        return ["".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids]]

    def drop() -> None:
        with engine.stream(BASE, max_new_tokens=20, ignore_eos=True, seed=1) as stream:
            next(stream)

    again(drop)
    return {"read": again(read)}


def shown(engine: Engine, again: Callable[..., Any]) -> Outcomes:
    """A progress bar, asyncio, and a picture of the tree on disk."""
    with contextlib.redirect_stdout(io.StringIO()):  # the bar itself
        bar = again(engine.generate, [BASE[:4], "in"], GREEDY, progress=True)
    later = again(lambda: asyncio.run(engine.agenerate(BASE[:6], GREEDY)))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "tree.html"
        again(engine.cache.to_html, page)
        again(engine.cache.save, Path(folder) / "cache.rkv")
        written = sorted(path.name for path in Path(folder).iterdir())
    return {"bar": outcome(bar), "later": outcome(later), "written": written}


class Harness:
    """Engines, loads and their fault-free outcomes; made once, used for every point."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.model, self.tokenizer = make_model(), make_tokenizer()
        self.places = points(self.tokenizer, self.model)
        self.engines: dict[str, Engine] = {}
        self.expected: dict[str, Outcomes] = {}
        self.counts: dict[str, int] = {}
        self.next: Any = None
        self.calls: Counter[str] = Counter()
        self.loads: dict[str, Any] = {
            "prompts": Batched(self.faults, "greedy prompt processed", 6),
            "forks": Batched(self.faults, "greedy samples beams", 6),
            "text": Batched(self.faults, "regex chat greedy samples", 8),
            "mixed": Batched(self.faults, "greedy samples processed beams prompt regex chat", 8),
        } | {
            script.__name__: Called(self.faults, script)
            for script in (branches, scores, streams, shown)
        }
        self.preemptions = 0

    @contextmanager
    def ready(self) -> Iterator[Harness]:
        """Within this block points are in place and engines are open."""
        roomy = Engine(
            self.model,
            self.tokenizer,
            kv=KVConfig(page_size=4, capacity="4MiB"),
            backend="cpu",
        )
        for name, load in self.loads.items():
            capacity = load.num_pages * roomy.cache.codec.bytes_per_page
            self.engines[name] = Engine(
                self.model,
                self.tokenizer,
                kv=KVConfig(page_size=4, capacity=capacity),
                max_batch_tokens=16,
                backend="cpu",
            )
            add_kernels(self.faults, self.engines[name])
        try:
            # In place before anything is run: a layer whose forward is its owner's runs as that has
            # it, whose low bits are others than those of a fused layer.
            with self.faults.installed(self.places):
                with self.faults.paused():
                    for name, load in self.loads.items():
                        self.expected[name] = load.solo(roomy)
                        roomy.cache.clear()
                    self.next = self._next(roomy)
                    roomy.close()
                for name in self.loads:
                    self.run(name, 0, 0)
                    self.counts[name] = self.faults.total
                    self.calls += self.faults.calls
                self.preemptions = sum(e.stats().preemptions for e in self.engines.values())
                yield self
        finally:
            for engine in self.engines.values():
                engine.close()

    def all_points(self) -> list[tuple[str, int, int]]:
        """(load, k, calls in a row that fail) for every k."""
        return [
            (name, k, count)
            for name, total in self.counts.items()
            for count in (1, 2)
            for k in range(1, total + 1)
        ]

    def run(self, name: str, first: int, count: int) -> list[Exception]:
        """Run a load with a fault at call ``first``; returns what was raised. Raises if wrong."""
        engine, expected = self.engines[name], self.expected[name]
        engine.cache.clear()
        self.faults.arm(first, count)
        found = self.loads[name].run(engine)
        raised = list(self.faults.raised)
        with self.faults.paused():
            assert found.keys() == expected.keys()
            failed = [part for part in found if isinstance(found[part], Exception)]
            for part in failed:
                assert any(found[part] is error for error in raised), (part, found[part])
            assert len(failed) <= len(raised), f"{failed} failed for {raised}"
            for part in found.keys() - set(failed):
                assert found[part] == expected[part], (part, found[part], expected[part])
            require_idle(engine)
            assert self._next(engine) == self.next, "the next request"
            require_idle(engine)
            engine.cache.clear()
            stats = engine.cache.stats()
            assert stats.pages_free == stats.pages_total, stats
        return raised

    def _next(self, engine: Engine) -> Any:
        request = engine.submit(BASE, GREEDY)
        while not request.done:
            engine.step()
        return outcome(request.result())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.faults", description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many points, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", help="only this load")
    parser.add_argument("--at", type=int, help="only this k of --load")
    parser.add_argument("--rows", type=int, default=1, help="calls in a row that fail, with --at")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("radixkv").setLevel(logging.CRITICAL + 1)  # of listeners that raised
    start = time.monotonic()
    with Harness().ready() as harness:
        todo = harness.all_points()
        if args.at is not None:
            todo = [(args.load or "mixed", args.at, args.rows)]
        elif args.load:
            todo = [point for point in todo if point[0] == args.load]
        if args.sample is not None:
            todo = random.Random(args.seed).sample(todo, min(args.sample, len(todo)))
        for name, calls in sorted(harness.calls.items()):
            print(f"{calls:6d} calls  {name}")
        print(f"{len(todo)} points; preemptions in the load: {harness.preemptions}", flush=True)
        raised = 0
        for done, (name, k, rows) in enumerate(todo, 1):
            try:
                raised += len(harness.run(name, k, rows))
            except BaseException:
                print(
                    f"failed at {[str(error) for error in harness.faults.raised]}; repeat with\n"
                    f"    python -m fuzz.faults --load {name} --at {k} --rows {rows}",
                    file=sys.stderr,
                )
                raise
            if done % 250 == 0:
                print(f"{done} points, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(todo)} points, {raised} faults, {time.monotonic() - start:.0f} s: all hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
