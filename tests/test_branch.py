"""Branches: what they find, what they leave, what they hold, and that nothing stays behind."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import Engine, KVConfig, SamplingParams
from radixkv.engine.kept_tokens import kept_tokens
from radixkv.text.continuations import encode_continuation
from radixkv.text.text_stream import TextStream
from radixkv.text.vocabulary import decode

GREEDY = dict(temperature=0, ignore_eos=True, logprobs=1)


def kv(**changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": "model", "page_size": 4, "capacity": "4MiB"} | changes)


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def check_idle(engine: Engine) -> None:
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def outcome(result: Any) -> Any:
    return [(sample.token_ids, sample.logprobs) for sample in result.samples]


# -- what is found and left (S1) ---------------------------------------------------------------


class Known:
    """Every sequence of tokens whose KV was computed; nothing is evicted."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def to_run(self, token_ids: list[int], most: int) -> int:
        """Tokens of ``token_ids`` that must be run, where at most ``most`` may be found."""
        found = 0
        for known in self.sequences:
            pairs = zip(known, token_ids[:most], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), most))
            found = max(found, same)
        return len(token_ids) - found


@pytest.fixture(scope="module")
def engines(tiny_model: Callable[..., Any]) -> Any:
    """``engines(page_size, dtype)``: one to try, and one of the same model for cold results."""
    made: dict[Any, tuple[Engine, Engine]] = {}

    def get(page_size: int, dtype: str) -> tuple[Engine, Engine]:
        if (page_size, dtype) not in made:
            config = kv(page_size=page_size, dtype=dtype)
            pair = [Engine(tiny_model("llama", fresh=True), kv=config) for _ in range(2)]
            made[page_size, dtype] = (pair[0], pair[1])
        return made[page_size, dtype]

    yield get
    for pair in made.values():
        for engine in pair:
            engine.close()


PIECES = [random_ids(n, seed=n) for n in (1, 3, 4, 9, 17)]
DEEDS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, len(PIECES) - 1)),
    st.tuples(st.just("generate"), st.integers(1, 6)),
    st.tuples(st.just("look"), st.integers(1, 3)),
    st.tuples(st.just("score"), st.integers(0, len(PIECES) - 1)),
    st.tuples(st.just("fork"), st.just(0)),
    st.tuples(st.just("truncate"), st.integers(1, 40)),
    st.tuples(st.just("open"), st.integers(0, len(PIECES) - 1)),
)


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(1, "model"), (4, "model"), (16, "model"), (4, "int8"), (16, "int4")]
)
@settings(max_examples=12)
@given(deeds=st.lists(st.tuples(st.integers(0, 3), DEEDS), min_size=3, max_size=14))
def test_branches_run_what_nobody_ran_yet_and_give_what_a_cold_engine_gives(
    engines: Any, page_size: int, dtype: str, deeds: list[Any]
) -> None:
    engine, cold = engines(page_size, dtype)
    engine.cache.clear()
    known = Known()
    branches = [engine.open(PIECES[3])]

    def alone(call: Callable[[], Any]) -> Any:
        cold.cache.clear()
        return call()

    def ran() -> int:
        stats = engine.stats()
        return int(stats.prefill_tokens)

    try:
        for which, (deed, number) in deeds:
            branch = branches[which % len(branches)]
            before, token_ids = ran(), list(branch.token_ids)
            if deed == "append":
                branch.append(PIECES[number])
                assert ran() == before
            elif deed in ("generate", "look"):
                fields = {**GREEDY, "max_new_tokens": number}
                result = branch.generate(keep=deed == "generate", **fields)
                expected = known.to_run(token_ids, len(token_ids) - 1)
                assert result.metrics.prefill_tokens == expected
                assert result.cached_tokens == len(token_ids) - expected
                new_ids = result.samples[0].token_ids
                known.sequences.append((token_ids + new_ids)[:-1])
                same = alone(lambda ids=token_ids, f=fields: cold.generate(ids, **f))
                if engine.is_batch_invariant:
                    assert outcome(result) == outcome(same)
                else:
                    assert new_ids == same.samples[0].token_ids
                assert branch.token_ids == token_ids + (new_ids if deed == "generate" else [])
            elif deed == "score":
                tails = [PIECES[number], PIECES[0]]
                scores = branch.score(tails)
                assert ran() - before == known.to_run(token_ids, len(token_ids) - 1)
                known.sequences += [(token_ids + tail)[:-1] for tail in tails]
                same = alone(lambda ids=token_ids, t=tails: cold.score(ids, t))
                for a, b in zip(scores, same, strict=True):
                    assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-4)
            elif deed == "fork":
                branches += branch.fork(2)
                assert ran() - before == known.to_run(token_ids[:-1], len(token_ids) - 1)
                known.sequences.append(token_ids[:-1])
            elif deed == "truncate":
                branch.truncate(min(number, len(token_ids)))
            else:
                branches.append(engine.open(PIECES[3] + PIECES[number]))
            engine.cache.check()
    finally:
        for branch in branches:
            branch.close()
    check_idle(engine)


@pytest.mark.parametrize("asked", ["generate", "fork", "score"])
def test_forks_that_are_asked_at_the_same_time_run_what_they_share_once(
    tiny_model: Any, asked: str
) -> None:
    tail = random_ids(60, seed=3)
    with Engine(tiny_model("llama"), kv=kv()) as engine, engine.open(PIECES[4]) as trunk:
        twins = trunk.fork(2)
        before = engine.stats().prefill_tokens
        errors: list[BaseException] = []

        def work(branch: Any) -> None:
            try:
                branch.append(tail)
                if asked == "generate":
                    branch.generate(**GREEDY, max_new_tokens=3)
                elif asked == "fork":
                    branch.fork()[0].close()
                else:
                    branch.score([[5, 6]])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(twin,)) for twin in twins]
        with engine.core.step_lock:  # no step before both are there
            for thread in threads:
                thread.start()
            with engine.core.changed:
                assert engine.core.changed.wait_for(
                    lambda: len(engine.core._inbox) == 2, timeout=60
                )
        for thread in threads:
            thread.join()
        assert not errors
        # The second finds whole pages; of the last page it runs its own copy.
        page = engine.cache.page_size
        first = len(tail) + (asked != "fork")
        again = (len(PIECES[4]) + len(tail) - (asked == "fork")) % page or (asked != "fork") * page
        assert engine.stats().prefill_tokens - before <= first + again
        for twin in twins:
            twin.close()


def test_what_a_branch_holds_is_not_evicted_and_leaves_room_for_others(tiny_model: Any) -> None:
    """keep=False, score and append hold what was computed, as generate does."""
    with Engine(tiny_model("llama"), kv=kv()) as engine:
        for do in (
            lambda b: b.generate(keep=False, max_new_tokens=2),
            lambda b: b.score([[5]]),
            lambda b: b.fork()[0].close(),
        ):
            with engine.open(PIECES[4]) as branch:
                do(branch)
                engine.cache.evict(10_000)
                again = branch.generate(max_new_tokens=1)
                assert again.metrics.prefill_tokens == 1
            engine.cache.clear()
            check_idle(engine)


def test_append_works_where_no_page_is_free_for_the_end_of_a_match(tiny_model: Any) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as probe:
        page_bytes = probe.cache.codec.bytes_per_page
    with Engine(tiny_model("llama"), kv=kv(capacity=6 * page_bytes, pin_share=1.0)) as engine:
        ids = random_ids(18, seed=1)
        engine.generate(ids, max_new_tokens=1)
        with engine.open(ids[:8]) as branch, engine.cache.acquire(random_ids(4, seed=2)):
            with engine.cache.pin(ids):
                branch.append(ids[8:11])
                branch.append(ids[11:])
                assert len(branch) == 18
            assert branch.generate(max_new_tokens=1).samples[0].token_ids
        check_idle(engine)


# -- what a branch holds after a stop string (B1) ----------------------------------------------


def say(num_prompt: int, token_ids: list[int]) -> Any:
    """A logits processor that makes a model say ``token_ids``, the last one for ever."""

    def processor(input_ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, -1e9)
        forced[:, token_ids[min(input_ids.shape[1] - num_prompt, len(token_ids) - 1)]] = 0
        return forced

    return processor


def make_tokenizer(kind: str) -> Any:
    """Byte-level BPE; SentencePiece-like BPE with prefix "first" or "always"; Unigram; words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>", "<unk>", "<|r|>", "<|end|>"]
    prefix = "always" if kind in ("always", "unigram") else "first"
    space = "Ġ" if kind == "byte" else "▁"
    merges = [("a", "b"), ("ab", "c"), (space, "ab"), ("\n" if kind != "byte" else "Ċ", "O")]
    if kind == "byte":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = ["▁", "\n", *map(chr, range(32, 127)), "é", "ß"]
    pieces = list(dict.fromkeys([*specials, *letters, *(left + right for left, right in merges)]))
    if kind == "unigram":
        scores = [(piece, -1.0 if len(piece) > 1 else -3.0) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=False))
    else:
        vocab = {piece: i for i, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if kind == "byte":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|r|>", "<|end|>"],
    )


KINDS = ("byte", "first", "always", "unigram")
TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_kept_tokens_decode_to_the_text_before_the_stop_string(kind: str, data: Any) -> None:
    """At every place of the stop string against the borders of tokens, specials among them."""
    tokenizer = TOKENIZERS[kind]
    vocabulary = sorted(tokenizer.get_vocab().items())
    ids = st.sampled_from([i for _, i in vocabulary])
    likely = st.sampled_from([i for piece, i in vocabulary if len(piece) > 1 and i != 3])
    prompt = data.draw(st.lists(st.one_of(ids, likely), min_size=1, max_size=4))
    if kind in ("always", "unigram"):  # which can't begin a text with anything but a space
        prompt.append(tokenizer.convert_tokens_to_ids("a"))
    said = data.draw(st.lists(st.one_of(ids, likely), min_size=1, max_size=9))
    skip = data.draw(st.booleans())
    free = TextStream(tokenizer, skip_special_tokens=data.draw(st.booleans()), after=prompt)
    text = free.push(said) + free.finish()
    if not text:
        return
    at = data.draw(st.integers(0, len(text) - 1))
    stop = text[at : data.draw(st.integers(at + 1, len(text)))]
    if "\ufffd" in stop:
        return
    stream = TextStream(tokenizer, skip_special_tokens=skip, stop=[stop], after=prompt)
    sample: list[int] = []
    for token_id in said:
        sample.append(token_id)
        stream.push([token_id])
        if stream.stopped is not None:
            break
    stream.finish()
    if stream.stopped is None:
        return
    num, tail = kept_tokens(
        tokenizer,
        prompt,
        sample,
        stream.text,
        stop=stop,
        skip_special_tokens=skip,
        vocab_size=len(tokenizer),
    )
    kept = sample[:num] + tail
    again = TextStream(tokenizer, skip_special_tokens=skip, after=prompt)
    assert again.push(kept) + again.finish() == stream.text
    assert num < len(sample)
    # No token is lost that the text says: one more would say too much, or a special stop string.
    more = TextStream(tokenizer, skip_special_tokens=skip, stop=[stop], after=prompt)
    shown = more.push(sample[: num + 1]) + more.finish()
    cut_special = sample[num] in tokenizer.all_special_ids
    assert more.stopped is not None or not stream.text.startswith(shown) or tail or cut_special


@pytest.mark.parametrize("stop", ["\n", "\nO", "\nOb", "Ob", "bs", "s:", ":", "c\nO", "a", "abc\n"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_a_branch_goes_on_from_the_text_that_was_given(
    engines_of: Any, kind: str, stop: str, dtype: str
) -> None:
    """What it holds is a prompt that says the same: the same tokens come after it."""
    engine = engines_of(kind, dtype)
    tokenizer = engine.tokenizer
    with engine.open("ab") as branch:
        prompt, text = list(branch.token_ids), branch.text
        spoken = encode_continuation(
            tokenizer, "abc\nObs: 5", after=prompt, vocab_size=engine.vocab_size
        )
        result = branch.generate(
            stop=[stop],
            max_new_tokens=len(spoken),
            temperature=0,
            logits_processors=[say(len(prompt), spoken)],
        )
        sample = result.samples[0]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.text == "abc\nObs: 5"[: "abc\nObs: 5".index(stop)]
        assert branch.text == text + sample.text
        assert branch.token_ids[: len(prompt)] == prompt
        held = list(branch.token_ids)
        engine.cache.check()
        after = branch.generate(**GREEDY, max_new_tokens=4)
        engine.cache.clear()
        cold = engine.generate(held, **GREEDY, max_new_tokens=4)
        assert after.samples[0].token_ids == cold.samples[0].token_ids
    check_idle(engine)


@pytest.fixture(scope="module")
def engines_of(tiny_model: Callable[..., Any]) -> Any:
    made: dict[Any, Engine] = {}

    def get(kind: str, dtype: str) -> Engine:
        if (kind, dtype) not in made:
            model = tiny_model("llama", fresh=True)
            made[kind, dtype] = Engine(model, TOKENIZERS[kind], kv=kv(dtype=dtype))
        engine = made[kind, dtype]
        engine.cache.clear()
        return engine

    yield get
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_with_a_special_token_is_cut_too(engines_of: Any, skip: bool) -> None:
    engine = engines_of("byte", "model")
    end, mark = (engine.tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|r|>"))
    word = engine.tokenizer("abc")["input_ids"]
    for stop, kept in (
        ("<|end|>", [*word, mark, *word]),
        ("c<|end|>", None),
        ("<|r|>", word),
    ):
        with engine.open("x") as branch:
            said = [*word, mark, *word, end, *word]
            result = branch.generate(
                stop=[stop],
                max_new_tokens=len(said),
                temperature=0,
                skip_special_tokens=skip,
                logits_processors=[say(1, said)],
            )
            assert result.samples[0].stop_reason == stop
            if kept is not None:
                assert branch.token_ids[1:] == kept
            assert decode(engine.tokenizer, branch.token_ids[1:], skip_special_tokens=skip) == (
                result.text
            )


def test_tokens_that_end_a_sample_stay_and_so_do_all_at_the_most(engines_of: Any) -> None:
    engine = engines_of("byte", "model")
    word = engine.tokenizer("abc")["input_ids"]
    eos = engine.tokenizer.eos_token_id
    for said, fields in (
        ([*word, eos], {}),
        ([*word, 9], {"stop_token_ids": [9]}),
        ([*word, 8, 7], {"max_new_tokens": len(word) + 2}),
    ):
        with engine.open("x") as branch:
            asked = {"max_new_tokens": 9, "temperature": 0, **fields}
            branch.generate(**asked, stop=["zz"], logits_processors=[say(1, said)])
            assert branch.token_ids[1:] == said


def test_a_sample_cut_by_time_is_held_as_far_as_it_came(engines_of: Any) -> None:
    """Its time is over when it has said a part of the stop string: that part is text."""
    engine = engines_of("byte", "model")
    said = engine.tokenizer("ab\nOb")["input_ids"]
    with engine.open("x") as branch:

        def late(input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] - 1 == len(said) - 1:
                for request in engine.core._live:
                    request.deadline = 0.0  # long ago
            return say(1, said)(input_ids, scores)

        result = branch.generate(
            stop=["\nObs"], max_new_tokens=30, timeout_s=1000, logits_processors=[late]
        )
        assert result.samples[0].finish_reason == "abort"
        assert result.text == "ab\nOb"
        assert branch.text == "x" + result.text
        assert branch.generate(max_new_tokens=1).metrics.prefill_tokens == 1
        engine.cache.check()


def test_part_of_a_token_without_tokens_of_its_own_is_left_out_and_said(
    tiny_model: Any, caplog: Any
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "x": 1, "stone": 5, "art": 3}, "<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with Engine(tiny_model("llama"), tokenizer, kv=kv()) as engine, engine.open([1]) as branch:
        result = branch.generate(
            stop=["one"], max_new_tokens=5, temperature=0, logits_processors=[say(1, [3, 5])]
        )
        assert branch.token_ids == [1, 3]
        assert (branch.text + "@").startswith("x art@"), result.text
        assert "no tokens that say it" in caplog.text


@pytest.mark.parametrize("keep", [True, False, 0, 2])
def test_keep_says_which_sample_is_appended(tiny_model: Any, keep: Any) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as engine, engine.open(PIECES[3]) as branch:
        result = branch.generate(n=3, seed=5, max_new_tokens=6, ignore_eos=True, keep=keep)
        kept = [] if keep is False else result.samples[int(keep) if keep is not True else 0]
        assert branch.token_ids == PIECES[3] + (kept and kept.token_ids)
        assert branch.generate(max_new_tokens=1).metrics.prefill_tokens == 1
        for bad in (3, -1, "first", None, 1.0):
            with pytest.raises((ValueError, TypeError), match="keep"):
                branch.generate(n=3, keep=bad)
        engine.cache.check()


# -- what is forgotten (C1) --------------------------------------------------------------------


def forgotten_branches(engine: Engine) -> None:
    engine.open(PIECES[3]).generate(max_new_tokens=2)
    branch = engine.open(PIECES[4])
    branch.append(PIECES[1])
    twins = branch.fork(2)
    twins[0].generate(n=2, max_new_tokens=3)
    twins[1].score([[5, 6], [7]])
    branch.generate(keep=False, max_new_tokens=2)


def forgotten_streams(engine: Engine) -> None:
    stream = engine.stream(PIECES[3], max_new_tokens=50, ignore_eos=True)
    next(stream)
    ended = stream.request._ended
    del stream
    assert ended.wait(60)


def forgotten_forks_of_leases(engine: Engine) -> None:
    with engine.cache.acquire(PIECES[3]) as lease:
        for other in [lease.fork() for _ in range(3)]:
            other.abandon()


def failing_calls(engine: Engine) -> None:
    def broken(input_ids: Any, scores: Any) -> Any:
        raise KeyError("user code")

    def attempt(call: Callable[[Any], Any]) -> None:
        branch = engine.open(PIECES[3])  # its frame is in the traceback
        branch.generate(max_new_tokens=2)
        with pytest.raises(KeyError):
            call(branch)

    fields: dict[str, Any] = dict(max_new_tokens=2, logits_processors=[broken])
    attempt(lambda branch: branch.generate(**fields))
    attempt(lambda branch: engine.generate(PIECES[:3], **fields))
    attempt(lambda branch: engine.generate(PIECES[3], **fields))
    attempt(lambda branch: list(engine.stream(PIECES[3], **fields)))
    for error in engine.generate(PIECES[:2], **fields, on_error="return"):
        assert isinstance(error, KeyError)
    with pytest.raises(ValueError, match="prompts"):
        engine.generate([PIECES[0], [5, -1]])
    request = engine.submit(PIECES[3], **fields)
    while not request.done:
        engine.step()
    with pytest.raises(KeyError):
        request.result()


def aborted_calls(engine: Engine) -> None:
    branch = engine.open(PIECES[3])
    assert branch.generate(max_new_tokens=200, timeout_s=1e-9).samples[0].finish_reason == "abort"
    request = engine.submit(PIECES[4], n=2, max_new_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.abort(request)


@pytest.mark.parametrize(
    "forget",
    [
        forgotten_branches,
        forgotten_streams,
        forgotten_forks_of_leases,
        failing_calls,
        aborted_calls,
    ],
)
def test_what_is_forgotten_is_no_cycle_and_holds_no_page(tiny_model: Any, forget: Any) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as engine:
        forget(engine)  # what is made once is made
        with engine.core.step_lock:
            gc.collect()
        gc.disable()
        try:
            forget(engine)
            with engine.core.step_lock:  # the step that ended the last request is over
                stats = engine.cache.stats()
            assert stats.pages_pinned == stats.pages_private == 0
            assert not engine.cache.core.leases
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = {
                f"{type(found).__module__}.{type(found).__name__}"
                for found in gc.garbage
                if type(found).__module__.startswith("radixkv")
                or isinstance(found, (KeyError, ValueError))
            }
            assert not ours
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        check_idle(engine)


class Holder:
    """In a cycle with itself."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


def test_a_full_pool_collects_garbage_before_a_request_is_refused(tiny_model: Any) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as probe:
        page_bytes = probe.cache.codec.bytes_per_page
    with Engine(tiny_model("llama"), kv=kv(capacity=8 * page_bytes)) as engine:
        asked = [
            lambda: engine.generate(random_ids(29, seed=1), max_new_tokens=2),
            lambda: engine.open(random_ids(29, seed=2)).generate(max_new_tokens=2),
            lambda: engine.score(random_ids(29, seed=3), [[5, 6]]),
            lambda: engine.open(random_ids(29, seed=4)).fork()[0].close(),
            lambda: engine.generate(random_ids(4, seed=5), max_new_tokens=28, ignore_eos=True),
        ]
        gc.disable()
        try:
            for i, ask in enumerate(asked):
                branch = engine.open(random_ids(20, seed=20 + i))
                branch.generate(max_new_tokens=1)
                Holder(branch)
                del branch
                assert engine.cache.stats().pages_pinned
                ask()
                assert not engine.cache.stats().pages_pinned
        finally:
            gc.enable()
        check_idle(engine)


def test_a_full_cache_collects_garbage_before_a_lease_is_refused() -> None:
    from radixkv import CapacityError, KVSpec, PrefixCache

    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16)
    cache = PrefixCache(spec, KVConfig(dtype="model", page_size=4, capacity=4 * 4 * 2 * 64))
    assert cache.pool.num_pages == 4
    rows = torch.ones(16, 1, 16)

    def leak(num_tokens: int) -> None:
        lease = cache.acquire(range(100, 100 + num_tokens))
        Holder(lease)

    def write(lease: Any) -> None:
        lease.write(0, rows[: lease.num_tokens], rows[: lease.num_tokens])

    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of leases that were dropped
            leak(16)
            cache.acquire(range(4)).release()
            leak(12)
            with cache.acquire(range(4)) as lease:
                lease.extend(range(4, 10))
            leak(12)
            with cache.acquire(range(4)) as lease, lease.fork() as other:
                write(other)  # copies the page, for which there is none but the leaked ones
            leak(12)
            with cache.acquire(range(4)) as lease, lease.fork() as other:
                assert len(other.slot_mapping) == 4
            gc.collect()
        with (
            cache.acquire(range(12)) as lease,
            pytest.raises(CapacityError, match="held"),
        ):
            cache.acquire(range(50, 60))
        assert lease.is_released
    finally:
        gc.enable()
    cache.check()
    assert cache.num_free_pages == 4


def test_a_branch_dropped_inside_a_call_of_the_cache_waits_for_its_end(tiny_model: Any) -> None:
    """A destructor may run in the middle of a call, or while another thread is in one."""
    with Engine(tiny_model("llama"), kv=kv()) as engine:
        branch = engine.open(PIECES[3])
        branch.generate(max_new_tokens=2)
        with engine.cache.core.guard:
            held = engine.cache.pool.num_free
            del branch
            assert engine.cache.pool.num_free == held
        check_idle(engine)
        branch = engine.open(PIECES[3])
        branch.generate(max_new_tokens=2)
        held_here, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with engine.cache.core.guard:
                held_here.set()
                go_on.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held_here.wait(60)
        del branch  # returns at once
        go_on.set()
        thread.join()
        check_idle(engine)


def test_a_closed_branch_is_no_branch(tiny_model: Any) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as engine:
        branch = engine.open(PIECES[3])
        branch.generate(SamplingParams(max_new_tokens=2))
        branch.close()
        branch.close()
        with pytest.raises(Exception, match="closed"):
            branch.append([5])
        del branch
        check_idle(engine)


def test_a_branch_that_opens_with_what_is_cached_finds_all_but_its_last_token(
    tiny_model: Any,
) -> None:
    with Engine(tiny_model("llama"), kv=kv()) as engine:
        prompt = random_ids(12, 1)
        engine.generate([*prompt, 7], max_new_tokens=1)
        with engine.open(prompt) as branch:
            assert branch.cached_tokens == len(prompt) - 1
