"""Run an engine hard for as long as you like: `python -m fuzz.soak --minutes 60`.

A random mixed load (samples, beams, scores, branches, streams, constrained text) in small pools,
with requests aborted, streams dropped and faults raised at random points. After each step the
sums must hold and `check()` must pass; what ends well must equal the same request alone on an
empty cache. A new engine (page size, format, pool, batch size) every few hundred steps. At the
end the memory of the process must not have grown.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fuzz.faults import FAULTS, Faults, add_kernels, outcome, points, require_idle, require_sums
from fuzz.tiny import make_model, make_tokenizer
from radixkv import BeamParams, CapacityError, Engine, KVConfig, SamplingParams

FAULT_RATE = 1 / 400  # of the calls of all points
STEPS = 250  # an engine
KEPT = 1500  # solo results that are remembered
GROWTH = 0.02  # most that the memory may grow after the warm-up


def rss_bytes() -> int:
    """Memory of this process that is in RAM, after a collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator only keeps is no leak
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """One random load after another; `run` does it for some seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults = Faults()
        self.faults.decide = lambda name, total: self.dice.random() < FAULT_RATE
        self.dice = random.Random(seed + 1)  # the engine's thread throws it too
        self.model, self.tokenizer = make_model(), make_tokenizer()
        self.oracles: dict[str, Engine] = {}
        self.solo: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.counts: Counter[str] = Counter()
        rng = random.Random(7)
        self.bases = [rng.choices(range(3, 260), k=24) for _ in range(4)]

    # -- what is asked ------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """Tokens that often begin as others did."""
        rng = self.random
        base = rng.choice(self.bases)[: rng.choice((0, 3, 8, 16, 24))]
        return base + [rng.randrange(3, 40) for _ in range(rng.randrange(1, 3))]

    def params(self) -> SamplingParams | BeamParams:
        """Options of a request; few enough that the same come again."""
        rng = self.random
        kind = rng.randrange(7)
        if kind == 0:
            return BeamParams(width=rng.randrange(1, 4), max_new_tokens=rng.randrange(1, 6))
        if kind == 1:
            return SamplingParams(seed=rng.randrange(2), regex="a[bc]{1,3}", max_new_tokens=5)
        fields: dict[str, Any] = {"temperature": rng.choice((0.0, 1.0)), "seed": rng.randrange(2)}
        fields |= {"max_new_tokens": rng.choice((1, 4, 9)), "n": rng.choice((1, 1, 2, 3))}
        if kind == 2:
            fields |= {"prompt_logprobs": 1, "logprobs": 2}
        if kind == 3:
            fields |= {"stop": ["the", "q"], "repetition_penalty": 1.3}
        if kind == 4:
            fields |= {"ignore_eos": True, "logits_processors": [self.processor]}
        return SamplingParams(**fields)

    def processor(self, input_ids: Any, logits: Any) -> Any:
        """A user's own code."""
        self.faults.hit("callback: logits processor")
        return logits.flip(-1)

    def alone(self, engine: Engine, prompt: list[int], params: Any) -> Any:
        """The outcome of a request by itself, on an empty cache, without faults."""
        dtype = engine.cache.config.dtype
        key = (dtype, tuple(prompt), repr(params))
        if key not in self.solo:
            with self.faults.paused():
                oracle = self.oracles.get(dtype)
                if oracle is None:
                    oracle = self.oracles[dtype] = Engine(
                        self.model,
                        self.tokenizer,
                        kv=KVConfig(dtype=dtype, page_size=16, capacity="2MiB"),
                        backend="torch",
                    )
                oracle.cache.clear()
                request = oracle.submit(prompt, params)
                while not request.done:
                    oracle.step()
                self.solo[key] = outcome(request.result())
                if len(self.solo) > KEPT:
                    self.solo.popitem(last=False)
        return self.solo[key]

    # -- one engine ---------------------------------------------------------------------------

    def make_engine(self) -> Engine:
        """An engine with a small pool and random options."""
        rng = self.random
        page_size = rng.choice((1, 2, 4, 8))
        dtype = rng.choice(("int8", "int8", "model", "fp8", "int4"))
        roomy = Engine(
            self.model,
            self.tokenizer,
            kv=KVConfig(
                dtype=dtype,
                page_size=page_size,
                capacity=rng.choice((48, 72, 120)) * self.bytes_per_token(dtype),
                eviction=rng.choice(("lru", "lfu", "priority")),
            ),
            max_batch_tokens=rng.choice((5, 16, 64)),
            backend="torch",
        )
        add_kernels(self.faults, roomy)
        return roomy

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of KV a token of this model in a format."""
        from radixkv import KVSpec
        from radixkv.attention.layout import KVCodec

        spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8)
        return KVCodec(spec, KVConfig(dtype=dtype)).bytes_per_token

    def check(self, engine: Engine) -> None:
        """Sums and owners, between two steps."""
        with engine.core.step_lock, self.faults.paused():
            require_sums(engine)
        self.counts["checks"] += 1

    def run_engine(self, until: float) -> None:
        """A load on one engine, to its end."""
        rng = self.random
        with self.faults.paused():
            engine = self.make_engine()
        self.counts["engines"] += 1
        live: list[tuple[Any, list[int], Any]] = []
        branches: list[Any] = []
        for _ in range(STEPS):
            if time.monotonic() > until:
                break
            kind = rng.randrange(12)
            try:
                if kind < 5 and len(live) < 8:
                    prompt, params = self.prompt(), self.params()
                    live.append((engine.submit(prompt, params), prompt, params))
                elif kind == 5 and live:
                    engine.abort(rng.choice(live)[0])
                elif kind == 6:
                    self.stream(engine)
                elif kind == 7:
                    engine.score(self.prompt(), [self.prompt()[:4], [5]])
                    self.counts["scores"] += 1
                elif kind == 8 and len(branches) < 2:
                    branches.append(engine.open(self.prompt()))
                elif kind in (9, 10) and branches:
                    self.grow(rng.choice(branches), branches)
                elif kind == 11 and branches:
                    branches.pop(rng.randrange(len(branches))).close()
                engine.step()
            except (*FAULTS, CapacityError) as error:
                self.counts[f"raised {type(error).__name__}"] += 1
            self.counts["steps"] += 1
            self.check(engine)
            live = self.collect(engine, live)
        for branch in branches:
            branch.close()
        left = 3000
        while live:
            engine.step()
            self.check(engine)
            live = self.collect(engine, live)
            left -= 1
            assert left, "no progress"
        with self.faults.paused():
            require_idle(engine)
            stats = engine.stats()
            self.counts["preemptions"] += stats.preemptions
            self.counts["evicted pages"] += stats.cache.evicted_pages
            self.counts["hit tokens"] += stats.cache.hit_tokens
            engine.close()
            assert engine.cache.num_free_pages == engine.cache.pool.num_pages

    def stream(self, engine: Engine) -> None:
        """Read a stream to its end, or some of it, or none."""
        stream = engine.stream(self.prompt(), seed=1, max_new_tokens=8, ignore_eos=True)
        how = self.random.randrange(4)
        if how == 0:
            for _ in stream:
                pass
        elif how == 1:
            next(stream)
            stream.close()
        elif how == 2:
            with stream:
                next(stream, None)
        del stream  # dropped, in any state
        self.counts["streams"] += 1

    def grow(self, branch: Any, branches: list[Any]) -> None:
        """Do something with a branch."""
        kind = self.random.randrange(5)
        if kind == 0:
            branch.append(self.prompt()[:3])
        elif kind == 1 and len(branch) > 3:
            branch.truncate(len(branch) // 2)
        elif kind == 2 and len(branches) < 3:
            branches.extend(branch.fork(1))
        elif kind == 3:
            branch.score([[5, 6], [7]])
        elif len(branch) < 40:
            branch.generate(seed=1, max_new_tokens=3, ignore_eos=True)
        self.counts["branch calls"] += 1

    def collect(
        self, engine: Engine, live: list[tuple[Any, list[int], Any]]
    ) -> list[tuple[Any, list[int], Any]]:
        """Compare what has ended with its solo run; return what runs on."""
        left = []
        for request, prompt, params in live:
            if not request.done:
                left.append((request, prompt, params))
            elif request.error is not None:
                assert isinstance(request.error, (*FAULTS, CapacityError)), request.error
                self.counts["failed requests"] += 1
            elif request.aborted:
                self.counts["aborted requests"] += 1
            else:
                expected = self.alone(engine, prompt, params)
                assert outcome(request.result()) == expected, (prompt, params)
                self.counts["compared requests"] += 1
        return left

    def run(
        self, seconds: float, log: Any = None, *, most_engines: int | None = None
    ) -> dict[str, Any]:
        """Soak for so long; returns the figures. Raises at the first thing that is wrong.

        Args:
            most_engines: end after so many, however long they took.
        """
        start = time.monotonic()
        samples: list[tuple[float, int]] = []
        with self.faults.installed(points(self.tokenizer, self.model)):
            while time.monotonic() < start + seconds:
                if self.counts["engines"] == most_engines:
                    break
                self.run_engine(start + seconds)
                samples.append((time.monotonic() - start, rss_bytes()))
                self.counts["faults raised"] += len(self.faults.raised)
                self.faults.raised.clear()
                if log is not None:
                    now, used = samples[-1]
                    print(f"{now:7.0f} s  {used / 2**20:7.1f} MiB  {dict(self.counts)}", file=log)
        for oracle in self.oracles.values():
            oracle.close()
        third = [used for at, used in samples if at >= seconds / 3] or [samples[-1][1]]
        edge = max(1, len(third) // 5)
        early, late = statistics.median(third[:edge]), statistics.median(third[-edge:])
        return dict(self.counts) | {
            "seconds": round(time.monotonic() - start),
            "rss_after_warm_up_mib": round(early / 2**20, 1),
            "rss_end_mib": round(late / 2**20, 1),
            "growth": round(late / early - 1, 4),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    torch.set_num_threads(1)
    logging.getLogger("radixkv").setLevel(logging.CRITICAL + 1)
    print(f"seed {seed}", flush=True)
    figures = Soak(seed).run(60 * args.minutes, log=sys.stderr)
    print(json.dumps(figures))
    if args.minutes >= 20 and figures["growth"] > GROWTH:
        print(f"memory grew by {figures['growth']:.1%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
