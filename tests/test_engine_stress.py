"""One engine under many callers at once, and samples that are the same whatever else happens."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv import Engine, KVConfig, SamplingParams

SEEDED = SamplingParams(n=4, seed=7, max_new_tokens=14, ignore_eos=True)


def config(**changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": "int8", "page_size": 4, "capacity": "4MiB"} | changes)


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def check_idle(engine: Engine) -> None:
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def tokens(result: Any) -> list[list[int]]:
    return [sample.token_ids for sample in result.samples]


def test_seeded_samples_are_the_same_whatever_else_happens(tiny_model: Any, tmp_path: Path) -> None:
    model, prompt = tiny_model("llama", seed=4), random_ids(22, seed=1)
    others = [prompt[:13] + random_ids(9, seed=2), random_ids(30, seed=3), prompt[:5]]
    with Engine(model, kv=config()) as engine:
        cold = tokens(engine.generate(prompt, SEEDED))
        assert len({tuple(ids) for ids in cold}) == 4
        assert tokens(engine.generate(prompt, SEEDED)) == cold  # warm
        assert (
            tokens(engine.generate(prompt, n=1, seed=7, max_new_tokens=14, ignore_eos=True))
            == (cold[:1])
        )
        for order in ([prompt, *others], [*others, prompt], [others[0], prompt, prompt]):
            engine.cache.clear()
            results = engine.generate(order, SEEDED)
            assert tokens(results[order.index(prompt)]) == cold
        page_bytes = engine.cache.codec.bytes_per_page
        check_idle(engine)
    # 14 pages: 22 + 14 tokens need 9, four samples of them 18, so some give way.
    with Engine(model, kv=config(capacity=14 * page_bytes)) as small:
        results = small.generate([*others[:2], prompt], SEEDED)
        assert small.stats().preemptions > 0
        assert tokens(results[2]) == cold
        check_idle(small)
    # Another process: nothing is left but the weights and the seed.
    model.save_pretrained(tmp_path)
    code = (
        "import json, sys\nfrom radixkv import Engine, KVConfig\n"
        f"kv = KVConfig(dtype='int8', page_size=4, capacity='4MiB')\n"
        f"with Engine.from_pretrained({str(tmp_path)!r}, kv=kv) as engine:\n"
        f"    result = engine.generate({prompt}, n=4, seed=7, max_new_tokens=14, ignore_eos=True)\n"
        "print(json.dumps([sample.token_ids for sample in result.samples]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == cold


def test_threads_and_tasks_on_a_small_pool_get_what_they_get_alone(tiny_model: Any) -> None:
    """8 threads and 200 tasks, a third of which give up on the way."""
    model = tiny_model("llama", seed=4)
    base = random_ids(16, seed=0)
    rng = random.Random(5)
    jobs = [
        (
            base[: rng.randint(1, 16)] + random_ids(rng.randint(1, 9), seed=i),
            SamplingParams(n=rng.choice((1, 1, 2)), seed=i, max_new_tokens=rng.randint(2, 7)),
        )
        for i in range(24)
    ]
    with Engine(model, kv=config()) as engine:
        alone = [tokens(engine.generate(*job)) for job in jobs]
        page_bytes = engine.cache.codec.bytes_per_page
    with Engine(model, kv=config(capacity=24 * page_bytes)) as engine:
        wrong: list[Any] = []
        num_aborted = 0

        def work(first: int) -> None:
            for i in range(first, first + 6):
                got = tokens(engine.generate(*jobs[i % len(jobs)]))
                if got != alone[i % len(jobs)]:
                    wrong.append(("thread", i, got))

        async def task(i: int) -> None:
            nonlocal num_aborted
            prompt, params = jobs[i % len(jobs)]
            if i % 3 == 0:  # gives up: before its first token, or after some
                stream = engine.astream(prompt, params)
                try:
                    async with asyncio.timeout(0.001 * (i % 50)):
                        async for _ in stream:
                            if i % 2:
                                break
                except TimeoutError:
                    pass
                await stream.aclose()  # type: ignore[attr-defined]
                num_aborted += 1
            elif i % 3 == 1:
                got: list[list[int]] = [[] for _ in range(params.n)]
                async for delta in engine.astream(prompt, params):
                    got[delta.index] += delta.token_ids
                if got != alone[i % len(jobs)]:
                    wrong.append(("stream", i, got))
            else:
                result = tokens(await engine.agenerate(prompt, params))
                if result != alone[i % len(jobs)]:
                    wrong.append(("task", i, result))

        async def tasks() -> None:
            await asyncio.gather(*(task(i) for i in range(200)))

        threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        asyncio.run(tasks())
        for thread in threads:
            thread.join()
        assert not wrong
        stats = engine.stats()
        assert num_aborted == 67
        assert stats.requests_aborted > 20
        assert stats.requests_live == stats.requests_failed == 0
        assert stats.batch_seqs_max > 4
        check_idle(engine)


def num_calls(do: Callable[[], object]) -> int:
    """How many functions this thread calls in ``do``."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("dtype", ["int8", "model"])
def test_a_thousand_branches_share_every_page_until_they_write(tiny_model: Any, dtype: str) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    prompt = random_ids(2006, seed=0)  # its KV, of all tokens but the last, ends inside a page
    kv = config(dtype=dtype, page_size=16, capacity="16MiB")
    with Engine(model, kv=kv) as engine:
        expected = tokens(engine.generate(prompt, temperature=0, max_new_tokens=3, ignore_eos=True))
        with engine.open(prompt) as trunk:
            trunk.fork()[0].close()  # computes what is not cached
            before = engine.cache.stats()
            forked: list[Any] = []
            calls = num_calls(lambda: forked.append(trunk.fork(1000)))
            (branches,) = forked
            assert calls <= 40 * 1000  # a few for each, though each holds 126 pages
            after = engine.cache.stats()
            assert after.pages_free == before.pages_free
            assert after.cow_copies == before.cow_copies
            page_bytes = engine.cache.codec.bytes_per_page
            held = -(-(len(prompt) - 1) // 16)
            saved = after.shared_bytes_saved - before.shared_bytes_saved
            assert saved == 1000 * held * page_bytes
            for number, branch in enumerate(branches[::250], start=1):
                result = branch.generate(temperature=0, max_new_tokens=3, ignore_eos=True)
                assert tokens(result) == expected
                stats = engine.cache.stats()
                assert stats.cow_copies == before.cow_copies + number  # its last page, no other
                assert before.pages_free - stats.pages_free <= number
            for branch in branches:
                branch.close()
        check_idle(engine)
        engine.cache.clear()
        assert engine.cache.stats().pages_free == engine.cache.stats().pages_total


FORKED = """
import os, sys, threading
import torch
from radixkv import Engine, KVConfig, RadixKVError

kv = KVConfig(dtype="int8", page_size=4, capacity="4MiB")
engine = Engine.from_pretrained(sys.argv[1], kv=kv)
prompts = [[5, 6, i] for i in range(3, 9)]
fields = dict(max_new_tokens=200, ignore_eos=True, temperature=0)
busy = threading.Thread(target=lambda: engine.generate(prompts, **fields))
busy.start()
branch, stream = engine.open([5, 6, 7, 8]), engine.stream([5, 6], **fields)
first = next(stream)
held = engine.core.changed, engine.cache.core.guard.lock  # as another thread may hold them then
with held[0], held[1]:
    child = os.fork()
if not child:
    def read_all():
        return [delta for delta in stream]
    for call in (lambda: engine.generate([5]), lambda: engine.stream([5]), read_all,
                 engine.step, engine.stats, branch.fork, lambda: engine.score([5], [[6]])):
        try:
            call()
        except RadixKVError as error:
            assert "does not survive fork()" in str(error), error
        else:
            os._exit(1)
    stream.close()
    branch.close()
    engine.close()
    torch.set_num_threads(1)  # OpenMP's threads stayed behind, too
    with Engine(engine.model, kv=kv, backend="torch") as own:  # as the message says
        assert own.generate([5, 6], **fields).samples[0].token_ids[:1] == first.token_ids
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
rest = [token_id for delta in stream for token_id in delta.token_ids]
busy.join()
branch.close()
assert len(rest) == 199
stats = engine.cache.stats()
assert stats.pages_free + stats.pages_cached == stats.pages_total
"""


def test_a_fork_of_a_busy_process_is_refused_in_the_child_and_harms_nobody(
    tiny_model: Any, tmp_path: Path
) -> None:
    tiny_model("llama", seed=4).save_pretrained(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
