"""A stop string ends a text where it would character by character, special tokens and all."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.text import TextStream
from radixkv.text.stop_strings import StopFinder, make_stop_finder

PIECES = ["a", "b", "ab", "ba", "<", "x>"]  # the last two spell a special token as text
SPECIALS = ["<x>", "<y>"]


def scripted() -> PreTrainedTokenizerFast:
    """Tokens with these very texts."""
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(PIECES)}, "?"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = scripted()
tokens = st.lists(
    st.tuples(st.sampled_from(PIECES), st.just(True))
    | st.tuples(st.sampled_from(SPECIALS), st.just(False)),
    max_size=14,
)
stops = st.lists(
    st.lists(st.sampled_from([*PIECES, *SPECIALS]), min_size=1, max_size=4).map("".join),
    max_size=3,
)


def expected(said: list[tuple[str, bool]], stop: list[str]) -> tuple[str, str | None]:
    """The text and the stop string, one character after the other."""
    raw = [(character, is_shown) for text, is_shown in said for character in text]
    for end in range(1, len(raw) + 1):
        found = []
        for one in stop:
            holds_special = any(text in one for text in SPECIALS)
            seen = [i for i in range(end) if holds_special or raw[i][1]]
            spelled = "".join(raw[i][0] for i in seen)
            if seen and seen[-1] == end - 1 and spelled.endswith(one):
                found.append((seen[-len(one)], one))
        if found:
            start, one = min(found)
            return "".join(c for c, is_shown in raw[:start] if is_shown), one
    return "".join(c for c, is_shown in raw if is_shown), None


@settings(max_examples=500)
@given(said=tokens, stop=stops, size=st.integers(1, 4))
@example(said=[("a", True), ("<x>", False), ("b", True)], stop=["ab"], size=1)
@example(said=[("<", True), ("x>", True)], stop=["<x>"], size=1)
@example(said=[("a", True), ("<x>", False), ("a", True)], stop=["a<x>b", "aa"], size=1)
def test_the_text_ends_where_it_would_character_by_character(
    said: list[tuple[str, bool]], stop: list[str], size: int
) -> None:
    ids = [TOKENIZER.convert_tokens_to_ids(text) for text, _ in said]
    stream = TextStream(TOKENIZER, stop=stop)
    out = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    out.append(stream.finish())
    assert "".join(out) == stream.text
    assert (stream.text, stream.stopped) == expected(said, stop)


@settings(max_examples=200)
@given(said=tokens, stop=stops)
def test_the_token_that_ends_a_sample_counts_but_is_not_shown(
    said: list[tuple[str, bool]], stop: list[str]
) -> None:
    for skip in (True, False):
        texts = [(text, is_shown or not skip) for text, is_shown in said]
        ids = [TOKENIZER.convert_tokens_to_ids(text) for text, _ in said]
        stream = TextStream(TOKENIZER, stop=stop, skip_special_tokens=skip)
        for token_id in ids:
            stream.push([token_id])
        stream.finish(end_token_id=TOKENIZER.convert_tokens_to_ids("<y>"))
        assert (stream.text, stream.stopped) == expected([*texts, ("<y>", False)], stop)


def test_a_vocabulary_without_such_special_tokens_costs_nothing() -> None:
    assert type(make_stop_finder(["ab", "<z>"], SPECIALS)) is StopFinder
    assert type(make_stop_finder([], SPECIALS)) is StopFinder


def test_nothing_that_a_stop_string_needs_is_shown_before_it_is_sure() -> None:
    stream = TextStream(TOKENIZER, stop=["b<x>a", "<y><y>"])
    ids = {text: TOKENIZER.convert_tokens_to_ids(text) for text in [*PIECES, *SPECIALS]}
    said = ["a", "b", "<x>", "b", "<y>", "a", "b", "<x>"]
    shown = [stream.push([ids[text]]) for text in said]
    assert shown == ["a", "", "", "b", "b", "a", "", ""]
    assert stream.push([ids["a"]]) == ""
    assert stream.stopped == "b<x>a"
    assert stream.text == "abba"


@pytest.mark.parametrize("skip", [True, False])
def test_byte_pieces_before_a_special_token_are_text_at_once(skip: bool) -> None:
    backend = Tokenizer(
        models.BPE({"<unk>": 0, "<0x0A>": 1, "<0xC3>": 2, "a": 3}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<x>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    special = tokenizer.convert_tokens_to_ids("<x>")
    for token_ids, stop, text in (
        ([3, 1, special, 1], "<x>\n", "a\n"),
        ([3, 1, special], "\n<x>", "a"),
        ([3, 2, special], "<x>", "a\ufffd"),
    ):
        stream = TextStream(tokenizer, stop=[stop], skip_special_tokens=skip)
        for token_id in token_ids:
            stream.push([token_id])
        stream.finish()
        assert (stream.text, stream.stopped) == (text, stop)
