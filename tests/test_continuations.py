"""A piece goes on after what stands before it, by every kind of tokenizer, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from radixkv.text import TextStream, encode_continuation

LETTERS = "abst.,'1 \n\u00e9\U0001f600"
SPECIALS = ["<s>", "</s>", "<|r|>", "<|end|>"]
MERGES = [("a", "b"), ("s", "a"), ("sa", "t"), ("t", "s"), ("a", "t"), ("1", "1"), (".", ".")]
MARK = "\u2581"


def fast(backend: Tokenizer, *, around: str | None = None) -> Any:
    """``around``: what the tokenizer adds, ``$A`` for the text."""
    backend.add_special_tokens(
        [*SPECIALS[:3], AddedToken("<|end|>", special=True, rstrip=True, normalized=False)]
    )
    backend.add_tokens([AddedToken("<tool>", special=False)])
    if around:
        ids = [(text, backend.token_to_id(text)) for text in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def byte_level(*, prefix: bool = False, regex: bool = True, around: str | None = None) -> Any:
    vocab = {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [*MERGES, ("\u0120", "a"), ("\u0120", "s"), ("\u0120", "\u0120"), ("\u010a", "\u010a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    backend.decoder = decoders.ByteLevel()
    return fast(backend, around=around)


def byte_level_normalized() -> Any:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    return tokenizer


def split_digits() -> Any:
    """As Llama 3: runs of digits by threes."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}|\s?[a-z]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def pieces_of(model: str) -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), MARK, *LETTERS.strip()]
    pieces += [left + right for left, right in MERGES]
    pieces += [MARK + MARK, MARK + "a", MARK + "s", MARK + "sat", MARK + "1"]
    return {piece: i for i, piece in enumerate(dict.fromkeys(p for p in pieces if p not in " \n"))}


SPM_MERGES = [*MERGES, (MARK, MARK), (MARK, "a"), (MARK, "s"), (MARK, "sat"), (MARK, "1")]


def spm(scheme: str, *, split: bool = False, around: str | None = None) -> Any:
    backend = Tokenizer(
        models.BPE(vocab=pieces_of("bpe"), merges=SPM_MERGES, byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return fast(backend, around=around)


def unigram(scheme: str = "always") -> Any:
    vocab = [(piece, -float(i % 17) - 1) for piece, i in pieces_of("unigram").items()]
    backend = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return fast(backend)


STRIPPING = [
    decoders.Replace(MARK, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def llama(*, legacy: bool, around: str | None = "<s> $A") -> Any:
    backend = Tokenizer(
        models.BPE(vocab=pieces_of("bpe"), merges=SPM_MERGES, byte_fallback=True, unk_token="<unk>")
    )
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(STRIPPING)
    return fast(backend, around=around)


def word_piece() -> Any:
    words = ["a", "b", "s", "t", "ab", "sat", ".", ",", "'", "1"]
    vocab = ["[UNK]", *words, *("##" + word for word in words)]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(vocab)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return fast(backend)


class Characters(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer in Python: one token a character."""

    def __init__(self, **options: Any) -> None:
        self.pieces = ["<s>", "</s>", "<unk>", *LETTERS]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.pieces.index(token) if token in self.pieces else 2

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index] if index < len(self.pieces) else "<unk>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, one run": byte_level(regex=False, around="<s> $A </s>"),
    "byte-level, prefix space": byte_level(prefix=True),
    "byte-level, normalized": byte_level_normalized(),
    "digits by threes": split_digits(),
    "spm always": spm("always"),
    "spm first": spm("first", around="<s> $A"),
    "spm never": spm("never"),
    "spm always, words": spm("always", split=True, around="$A </s>"),
    "spm first, words": spm("first", split=True),
    "unigram": unigram(),
    "unigram first": unigram("first"),
    "llama": llama(legacy=False),
    "llama, legacy": llama(legacy=True),
    "word piece": word_piece(),
    "bytes in Python": ByT5Tokenizer(),
    "characters in Python": Characters(),
}
# Whether a vocabulary has tokens for every text as it is.
KEEPS = {name: name not in ("word piece", "byte-level, normalized") for name in TOKENIZERS}
texts = st.lists(st.sampled_from([*LETTERS, " a", " sat", "s", "ab", "  "]), max_size=12).map(
    "".join
)
marked = st.lists(st.sampled_from([*LETTERS, *SPECIALS, " sat", "<tool>"]), max_size=12).map(
    "".join
)


def decode(tokenizer: Any, token_ids: list[int], skip: bool = True) -> str:
    text: str = tokenizer.decode(
        token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    return text


def plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def whole_prompt(tokenizer: Any, text: str) -> list[int]:
    """With what the tokenizer adds; ByT5 warns where that is there already."""
    return plain(tokenizer, text) if "</s>" in text else list(tokenizer(text)["input_ids"])


def streamed(tokenizer: Any, token_ids: list[int], **options: Any) -> tuple[str, TextStream]:
    stream = TextStream(tokenizer, **options)
    pieces = [stream.push([token_id]) for token_id in token_ids] + [stream.finish()]
    assert "".join(pieces) == stream.text
    return stream.text, stream


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_the_prompts_text_and_the_streams_are_the_text_of_all(name: str, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)
    prompt_ids = data.draw(st.one_of(marked.map(lambda text: whole_prompt(tokenizer, text)), ids))
    token_ids = data.draw(st.one_of(ids, marked.map(lambda text: plain(tokenizer, text))))
    skip = data.draw(st.booleans())
    text, _ = streamed(tokenizer, token_ids, after=prompt_ids, skip_special_tokens=skip)
    before, whole = (decode(tokenizer, part, skip) for part in (prompt_ids, prompt_ids + token_ids))
    if whole.startswith(before):
        assert before + text == whole
    else:  # a character of the prompt was completed, or a run of byte pieces is not UTF-8 now
        assert "\ufffd" in before + whole
        assert whole.endswith(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(text=marked, piece=texts.filter(bool), data=st.data())
def test_a_pieces_tokens_decode_to_the_piece_after_the_text(
    name: str, text: str, piece: str, data: Any
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt_ids = data.draw(st.sampled_from([whole_prompt(tokenizer, text), plain(tokenizer, text)]))
    if not plain(tokenizer, piece):
        with pytest.raises(ValueError, match="continuation: expected at least one token"):
            encode_continuation(tokenizer, piece, after=prompt_ids, vocab_size=999)
        return
    found = encode_continuation(tokenizer, piece, after=prompt_ids, vocab_size=len(tokenizer) + 300)
    skip = data.draw(st.booleans())
    before, whole = (decode(tokenizer, part, skip) for part in (prompt_ids, prompt_ids + found))
    # With special tokens alone before it, a piece that begins with a space can't be both in one
    # view and the other: the one that leaves special tokens out sees the beginning of a text.
    alone = not decode(tokenizer, prompt_ids)
    openings = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if KEEPS[name] and not (alone and skip) and set(prompt_ids) - openings:
        assert whole == before + piece
    elif name == "byte-level, normalized" and "<" not in text:
        assert whole == decode(tokenizer, plain(tokenizer, before + piece))
    elif not prompt_ids:
        assert found == plain(tokenizer, piece)
