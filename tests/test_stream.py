"""Streams and asyncio: pieces as they come, whoever reads them, however they are left."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from radixkv import Engine, KVConfig
from radixkv.engine.request import Request


def kv(dtype: str = "model", **changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": dtype, "page_size": 4, "capacity": "8MiB"} | changes)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def check_idle(engine: Engine) -> None:
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.pages_pinned == stats.pages_private == 0


def test_streamed_deltas_join_to_the_text(tiny_model: Any, byte_tokenizer: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, byte_tokenizer, kv=kv()) as engine:
        fields: dict[str, Any] = dict(n=3, seed=5, max_new_tokens=25, stop=["q"])
        whole = engine.generate("the onion", **fields)
        text: dict[int, str] = {0: "", 1: "", 2: ""}
        token_ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        reasons = {}
        for delta in engine.stream("the onion", **fields):
            text[delta.index] += delta.text
            token_ids[delta.index] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
        for i, sample in enumerate(whole.samples):
            assert text[i] == sample.text
            assert token_ids[i] == sample.token_ids
            assert reasons[i] == sample.finish_reason
            assert "q" not in sample.text
        check_idle(engine)


def test_a_stream_that_nobody_reads_is_paused(
    tiny_model: Any, byte_tokenizer: Any, monkeypatch: Any
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr("radixkv.engine.stream.STREAM_DELTAS", 8)
    with Engine(model, byte_tokenizer, kv=kv()) as engine:
        fields: dict[str, Any] = dict(temperature=0, max_new_tokens=60, ignore_eos=True)
        expected = engine.generate("the engine", **fields).samples[0].token_ids
        before = engine.stats().decode_tokens
        paused = threading.Event()
        pause_or_go_on = Request.pause_or_go_on

        def noting(request: Request) -> None:
            pause_or_go_on(request)
            if all(seq.paused for seq in request._sequences):
                paused.set()

        monkeypatch.setattr(Request, "pause_or_go_on", noting)
        stream = engine.stream("the engine", **fields)
        next(stream)
        paused.clear()  # that read may have let it go on
        assert paused.wait(60)
        # Of 60: as many as wait for a reader, and those that the first read took together.
        assert stream.request.num_tokens <= 16
        # Others are served meanwhile, and it goes on when it is read.
        engine.generate("another one", **fields)
        assert stream.request.num_tokens <= 16
        rest = [token_id for delta in stream for token_id in delta.token_ids]
        assert rest == expected[1:]
        assert engine.stats().decode_tokens > before
        check_idle(engine)


async def cancel_in_a_step(engine: Engine, fields: dict[str, Any]) -> None:
    """Cancel a task that reads a stream, while the model runs: the request can't have ended."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == 8:
            reached.set()
            assert go_on.wait(60)
        return scores

    async def consume() -> None:
        async for _delta in engine.astream([5, 6, 7], logits_processors=[hold], **fields):
            pass

    task = asyncio.create_task(consume())
    assert await asyncio.get_running_loop().run_in_executor(None, reached.wait, 60)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("road", ["break", "close", "del", "raise", "unstarted", "async"])
def test_abandoned_streams_give_their_pages_back(
    tiny_model: Any, byte_tokenizer: Any, road: str
) -> None:
    model = tiny_model("llama")
    fields: dict[str, Any] = dict(max_new_tokens=40, temperature=0, ignore_eos=True)
    with Engine(model, byte_tokenizer, kv=kv()) as engine:
        alone = engine.generate("another one", **fields).text
        for _ in range(10):
            beside = engine.stream("another one", **fields)
            next(beside)
            stream = engine.stream("the engine", **fields)
            if road == "break":
                for i, _delta in enumerate(stream):
                    if i == 1:
                        break
                stream = None
            elif road == "close":
                next(stream), next(stream)
                stream.close()
                assert list(stream) == []
            elif road == "del":
                next(stream)
                del stream
            elif road == "raise":
                try:
                    for _delta in stream:
                        raise KeyError
                except KeyError:
                    pass
                stream = None
            elif road == "unstarted":
                del stream
            else:
                stream.close()
                asyncio.run(cancel_in_a_step(engine, fields))
            rest = "".join(delta.text for delta in beside)
            assert alone.endswith(rest)
        assert engine.generate("another one", **fields).text == alone
        check_idle(engine)
        assert engine.stats().requests_live == 0


def test_async_and_threads_give_what_one_call_gives(tiny_model: Any, byte_tokenizer: Any) -> None:
    model = tiny_model("llama")
    prompts = [f"the one in {i}" for i in range(12)]
    with Engine(model, byte_tokenizer, kv=kv()) as engine:
        alone = [engine.generate(p, seed=i, max_new_tokens=12).text for i, p in enumerate(prompts)]
        got: list[str] = [""] * len(prompts)

        def work(i: int) -> None:
            got[i] = engine.generate(prompts[i], seed=i, max_new_tokens=12).text

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == alone

        async def together() -> list[Any]:
            calls = [engine.agenerate(p, seed=i, max_new_tokens=12) for i, p in enumerate(prompts)]
            return await asyncio.gather(*calls)

        assert [r.text for r in asyncio.run(together())] == alone
        check_idle(engine)
