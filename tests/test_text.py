"""Prompts become ids or a clear error; streamed text is the decoded text, cut at stop strings."""

import dataclasses
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv import Engine, KVConfig
from radixkv.text import TextStream, encode_prompt, is_prompt, tokenizer_lock


def byte_level():
    """Every byte a token, and merges that cut emoji after 1, 2 and 3 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    mapped = {}  # byte -> its printable stand-in
    for character in alphabet:
        raw = decoders.ByteLevel().decode([character]).encode("utf-8", "replace")
        if len(raw) == 1 and raw[0] < 128:
            mapped[raw[0]] = character
    spare = iter(c for c in alphabet if c not in set(mapped.values()))
    # The stand-in of a byte of 161..172 and 174..255 is the character itself; the others follow.
    for byte in range(256):
        if byte not in mapped and chr(byte) in alphabet:
            mapped[byte] = chr(byte)
    rest = [c for c in spare if c not in set(mapped.values())]
    for byte, character in zip([b for b in range(256) if b not in mapped], rest, strict=True):
        mapped[byte] = character
    pieces = [mapped[byte] for byte in range(256)]
    merges = []
    for text in ["\U0001f600", "\U0001f601", "\u00e9", " the", "\u20ac", "ab", "  ", "\ufffd"]:
        raw = text.encode()
        for size in range(2, len(raw) + 1):
            left, right = "".join(mapped[b] for b in raw[: size - 1]), mapped[raw[size - 1]]
            if left + right not in pieces:
                pieces.append(left + right)
                merges.append((left, right))
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


INF = float("inf")
WORDS = ["a", "b", "ab", "the", "of", ".", ",", "'s", "n't", "?", "\u00e9", "\U0001f600", "\ufffd"]


def metaspace():
    pieces = ["<unk>", "\u2581", "\u2581\u2581", *WORDS, *("\u2581" + word for word in WORDS)]
    backend = Tokenizer(models.Unigram([(p, -float(i)) for i, p in enumerate(pieces)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def byte_fallback():
    """As Llama 2: spaces as marks, bytes where the vocabulary ends, one leading space taken."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581"]
    pieces += [*WORDS, *("\u2581" + word for word in WORDS)]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def word_piece():
    pieces = ["[UNK]", *WORDS, *("##" + word for word in WORDS)]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")


def word_end():
    """As the first GPT: a mark at the end of words, no space after the last."""
    pieces = ["<unk>", *WORDS, *(word + "</w>" for word in WORDS)]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {
    make.__name__: make() for make in (byte_level, metaspace, byte_fallback, word_piece, word_end)
}
BYTES = TOKENIZERS["byte_level"]


def scripted(*texts):
    """A tokenizer whose token i is exactly ``texts[i]``."""
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, "?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def whole(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def run(tokenizer, token_ids, sizes=(1,), **options):
    """Push ``token_ids`` in pieces of ``sizes``, in turn; return the pieces of text, the stream."""
    stream = TextStream(tokenizer, **options)
    out, at, turn = [], 0, 0
    while at < len(token_ids):
        size = sizes[turn % len(sizes)]
        out.append(stream.push(token_ids[at : at + size]))
        at, turn = at + size, turn + 1
    out.append(stream.finish())
    assert "".join(out) == stream.text
    return out, stream


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_text_of_all_tokens(name, data):
    tokenizer = TOKENIZERS[name]
    # Few different ids make long runs of bytes, of spaces and of special tokens likely.
    pool = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), min_size=1, max_size=40))
    token_ids = data.draw(st.lists(st.sampled_from(pool), max_size=120))
    skip = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    _, stream = run(tokenizer, token_ids, sizes, skip_special_tokens=skip)
    assert stream.text == whole(tokenizer, token_ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_random_streams_are_the_text_of_all_tokens(name):
    tokenizer = TOKENIZERS[name]
    rng = random.Random(5)
    for few in (3, 10, 60, len(tokenizer)):
        for _ in range(12):
            pool = [rng.randrange(len(tokenizer)) for _ in range(few)]
            token_ids = [rng.choice(pool) for _ in range(400)]
            _, stream = run(tokenizer, token_ids)
            assert stream.text == whole(tokenizer, token_ids)


BYTE_OF = {BYTES.convert_ids_to_tokens(byte): byte for byte in range(256)}
ID_OF = {
    bytes(BYTE_OF[character] for character in BYTES.convert_ids_to_tokens(i)): i
    for i in range(len(BYTES) - 3)
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("num_empty", [7, 8, 30, 100])
def test_tokens_without_text_do_not_make_what_follows_the_start_of_the_text(name, num_empty):
    tokenizer = TOKENIZERS[name]
    none = len(tokenizer) + 1
    for word in [i for i in range(len(tokenizer)) if i > len(tokenizer) - 12]:
        token_ids = [*[word] * 30, *[none] * num_empty, word, word]
        assert run(tokenizer, token_ids)[1].text == whole(tokenizer, token_ids)


def ids_of_bytes(raw, sizes):
    """Ids of ``raw`` cut at ``sizes``; each part must be one token."""
    ends = list(itertools.accumulate(sizes))
    return [ID_OF[raw[end - size : end]] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 3), (2, 1, 1), (1, 1, 1, 1), (4,)])
def test_a_character_comes_whole_and_only_when_its_last_byte_is_there(sizes):
    emoji = "\U0001f600"
    try:
        token_ids = ids_of_bytes(emoji.encode(), sizes)
    except KeyError:
        assert sizes in {(2, 2), (1, 3)}  # no such token: single bytes stand for the last part
        token_ids = ids_of_bytes(emoji.encode(), (sizes[0], *[1] * sizes[1]))
    out, stream = run(BYTES, [*ids_of_bytes(b"a", (1,)), *token_ids, *ids_of_bytes(b"b", (1,))])
    assert out == ["a", *[""] * (len(token_ids) - 1), emoji, "b", ""]
    assert "\ufffd" not in stream.text


def test_a_character_cut_by_the_end_is_one_replacement_character_at_finish():
    stream = TextStream(BYTES)
    assert stream.push(ids_of_bytes(b"a\xf0\x9f", (1, 1, 1))) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.text == "a\ufffd"
    with pytest.raises(ValueError, match="finished"):
        stream.push([1])


def test_streams_of_one_tokenizer_keep_apart():
    first, second = TextStream(BYTES), TextStream(BYTES)
    euro = ids_of_bytes("\u20ac".encode(), (1, 1, 1))
    assert first.push(euro[:2]) + second.push(ids_of_bytes(b"x", (1,))) == "x"
    assert first.push(euro[2:]) == "\u20ac"


LETTERS = ("ABC", "DEF", "G", "HI", "J", "K")


@pytest.mark.parametrize(
    "stop, text, stopped",
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["GH"], "ABCDEF", "GH"),
        (["HIJKL"], "ABCDEFGHIJK", None),
        (["C", "CD"], "AB", "C"),
        (["CD", "C"], "AB", "C"),
        (["B"], "A", "B"),
        (["CD"], "AB", "CD"),
        (["K"], "ABCDEFGHIJ", "K"),
        (["EFX", "FG"], "ABCDE", "FG"),
    ],
)
def test_stop_strings_over_tokens_are_cut_and_never_shown(stop, text, stopped):
    tokenizer = scripted(*LETTERS)
    out, stream = run(tokenizer, range(6), stop=stop)
    assert (stream.text, stream.stopped) == (text, stopped)
    assert "".join(out) == text


def test_what_may_become_a_stop_string_is_held_and_released():
    stream = TextStream(scripted(*LETTERS), stop=["DEFGHIX"])
    assert [stream.push([i]) for i in range(5)] == ["ABC", "", "", "", "DEFGHIJ"]
    assert stream.finish() == ""
    stream = TextStream(scripted(*LETTERS), stop=["HIJKL"])
    assert [stream.push([i]) for i in range(6)] == ["ABC", "DEF", "G", "", "", ""]
    assert stream.finish() == "HIJK"


def test_after_a_stop_string_nothing_more_comes():
    stream = TextStream(scripted(*LETTERS), stop=["G"])
    assert stream.push([0, 1, 2, 3]) == "ABCDEF"
    assert stream.push([4]) == "" and stream.finish() == "" and stream.text == "ABCDEF"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\u00e9", max_size=30),
    stop=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_a_stop_string_ends_the_text_where_it_would_character_by_character(text, stop, cuts):
    expected, stopped = text, None
    for end in range(len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            stopped = max(done, key=len)
            expected = text[: end - len(stopped)]
            break
    raw = text.encode()
    out, stream = run(BYTES, ids_of_bytes(raw, [1] * len(raw)), cuts, stop=stop)
    assert (stream.text, stream.stopped) == (expected, stopped)
    assert "".join(out) == expected


def test_a_stop_string_that_only_the_end_shows_is_the_reason(tiny_model):
    """A byte piece waits for what follows it; where nothing does, it is looked at all the same."""
    tokenizer = TOKENIZERS["byte_fallback"]
    model = tiny_model("llama", vocab_size=len(tokenizer))
    newline, end = tokenizer.convert_tokens_to_ids(["<0x0A>", "</s>"])
    with Engine(model, tokenizer, kv=KVConfig(capacity="1MiB"), backend="torch") as engine:
        core = engine.core
        core.intake = dataclasses.replace(core.intake, eos_token_ids=frozenset([end]))
        for script in ([newline], [newline, newline], [newline, end], [5, newline]):

            def follow(input_ids, scores, script=script):
                at = input_ids.shape[1] - 1
                return torch.full_like(scores, -INF).index_fill(1, torch.tensor(script[at]), 0.0)

            fields = dict(max_new_tokens=len(script), stop="\n", logits_processors=[follow])
            (one,) = engine.generate([7], **fields).samples
            assert (one.finish_reason, one.stop_reason) == ("stop", "\n")
            assert "\n" not in one.text
            *_, last = engine.stream([7], **fields)
            assert last.finish_reason == "stop"


def test_special_tokens_are_left_out_or_kept():
    end = BYTES.eos_token_id
    token_ids = [*ids_of_bytes(b"a", (1,)), end]
    assert run(BYTES, token_ids)[1].text == "a"
    assert run(BYTES, token_ids, skip_special_tokens=False)[1].text == "a</s>"


class Counting:
    """Counts the ids that a tokenizer decodes."""

    def __init__(self, tokenizer):
        self.inner, self.num_decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return self.inner.decode(token_ids, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["all", "one", "tail"])
def test_work_a_token_does_not_grow_with_the_text(name, kind):
    rng = random.Random(1)
    inner = TOKENIZERS[name]
    vocab = {"all": range(len(inner)), "one": range(3, 4), "tail": range(255, 258)}[kind]
    vocab = [i for i in vocab if i < len(inner)] or [1]
    per_token = []
    for length in (300, 3000):
        tokenizer = Counting(inner)
        run(tokenizer, [rng.choice(vocab) for _ in range(length)], stop=["zzz"])
        per_token.append(tokenizer.num_decoded / length)
    assert per_token[1] <= 40
    assert per_token[1] <= 1.3 * per_token[0] + 1


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string():
    stream = TextStream(None)
    assert stream.push([1, 2]) == stream.finish() == stream.text == ""
    with pytest.raises(ValueError, match="stop_token_ids"):
        TextStream(None, stop=["x"])
    with pytest.raises(ValueError, match="not empty"):
        TextStream(BYTES, stop=[""])


def test_one_prompt_is_told_from_many():
    chat = [{"role": "user", "content": "hi"}]
    one = ["text", [1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), chat]
    one += [[np.int32(1), torch.tensor(2)], range(3)]
    for prompt in one:
        assert is_prompt(prompt)
        assert not is_prompt([prompt])
    assert not is_prompt(one)
    assert not is_prompt(["a", "b"]) and not is_prompt([[1], [2, 3]])
    assert not is_prompt(torch.zeros(2, 3, dtype=torch.int64))
    for empty in ([], ()):
        with pytest.raises(ValueError, match="empty"):
            is_prompt(empty)
    for wrong in (3, None, b"bytes", torch.tensor(3), {1: 2}, {"role": "user"}, iter([1])):
        with pytest.raises(TypeError, match="prompt: expected"):
            is_prompt(wrong)
    for mix in ([1, "a"], [chat[0], "a"], [chat[0], 1], [[1], 2]):
        with pytest.raises(TypeError, match="mix"):
            is_prompt(mix)


@pytest.mark.parametrize(
    "ids",
    [
        [0, 5, 9],
        (0, 5, 9),
        np.array([0, 5, 9], dtype=np.uint16),
        torch.tensor([0, 5, 9], dtype=torch.int32),
        [np.int64(0), torch.tensor(5), 9],
        [np.array(0), np.uint8(5), torch.tensor(9, dtype=torch.uint8)],
    ],
)
def test_ids_of_every_integer_kind_become_ints(ids):
    found = encode_prompt(None, ids, vocab_size=10)
    assert found == [0, 5, 9] and all(type(i) is int for i in found)


@pytest.mark.parametrize(
    "prompt, error, says",
    [
        ("", ValueError, "empty"),
        ([], ValueError, "empty"),
        (np.array([], dtype=np.int64), ValueError, "at least one"),
        ([1, 10], ValueError, "0 to 9, got 10 at position 1"),
        ([1, -1], ValueError, "got -1 at position 1"),
        ([1, 2**70], ValueError, "at position 1"),
        ([1, True], TypeError, "position 1, got True"),
        ([1, np.True_], TypeError, "position 1"),
        ([torch.tensor(True)], TypeError, "position 0"),
        ([1, 2.0], TypeError, "position 1, got 2.0"),
        ([1, None], TypeError, "position 1, got None"),
        (np.array([1.0]), TypeError, "integers"),
        (torch.tensor([True]), TypeError, "integers"),
        (torch.tensor([1.5]), TypeError, "integers"),
        ("text", TypeError, "pass ids"),
        ([{"role": "user", "content": "x"}], TypeError, "pass ids"),
        (["a", "b"], TypeError, "list of prompts"),
    ],
)
def test_a_wrong_prompt_is_named(prompt, error, says):
    with pytest.raises(error, match=says):
        encode_prompt(None, prompt, vocab_size=10)


def test_text_is_encoded_as_the_tokenizer_does():
    text = "the \U0001f600 of"
    assert encode_prompt(BYTES, text, vocab_size=len(BYTES)) == BYTES(text)["input_ids"]
    with pytest.raises(ValueError, match="model's own tokenizer"):
        encode_prompt(BYTES, "\u00ff", vocab_size=100)


def test_a_chat_goes_through_the_template():
    tokenizer = byte_level()
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="chat_template"):
        encode_prompt(tokenizer, chat, vocab_size=len(tokenizer))
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    found = encode_prompt(tokenizer, chat, vocab_size=len(tokenizer))
    assert whole(tokenizer, found) == "[user]hi[bot]"
    with pytest.raises(ValueError, match="no system"):
        encode_prompt(tokenizer, [{"role": "system", "content": "x"}], vocab_size=999)
    for message in ({}, {"role": "user"}, {"content": "x"}, {"role": 3, "content": "x"}):
        with pytest.raises(ValueError, match="position 1"):
            encode_prompt(tokenizer, [*chat, message], vocab_size=999)
    with pytest.raises(ValueError, match="position 0"):
        encode_prompt(tokenizer, [{"role": "user", "content": 5}], vocab_size=999)


def test_threads_with_one_tokenizer_get_their_single_thread_results():
    tokenizer = byte_level()
    texts = [f"the {i} \U0001f600 ab\u20ac" * (1 + i % 3) for i in range(16)]
    expected = [BYTES(text)["input_ids"] for text in texts]
    tokenizer.pad_token = "</s>"

    def work(i):
        for _ in range(12):
            found = encode_prompt(tokenizer, texts[i], vocab_size=len(tokenizer))
            with tokenizer_lock(tokenizer):
                tokenizer(texts[i], truncation=True, max_length=3 + i, padding="max_length")
            assert found == expected[i]
            assert run(tokenizer, found)[1].text == texts[i]

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))


def test_one_lock_a_tokenizer_taken_again_by_its_thread():
    with tokenizer_lock(BYTES), tokenizer_lock(BYTES):
        free = []
        other = TOKENIZERS["metaspace"]

        def use_both():
            TextStream(other).push([3])
            free.append(tokenizer_lock(BYTES).acquire(blocking=False))

        thread = threading.Thread(target=use_both)
        start = time.monotonic()
        thread.start()
        thread.join(timeout=30)
        assert free == [False] and time.monotonic() - start < 30
