"""Token ids of a text that continues other tokens: for `score` and `Branch.append`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.config import require_unicode
from radixkv.failures import blame
from radixkv.text.prompts import encode_prompt, is_prompt, is_sequence
from radixkv.text.text_end import TextEnd


def encode_continuation(
    tokenizer: Any,
    tail: object,
    *,
    after: Sequence[int] | TextEnd,
    vocab_size: int,
    name: str = "continuation",
) -> list[int]:
    """Token ids of text or ids that continue other tokens; no special tokens are added.

    Args:
        tail: text or token ids.
        after: the tokens that stand before, empty where a text begins; for several texts that
            go on at one place, its `TextEnd` (with special tokens kept).
        vocab_size: ids must be below it.
        name: what errors call it.
    Raises:
        TypeError, ValueError: as `encode_prompt`; a chat or an empty continuation too.
    """
    if isinstance(tail, str) and tail and tokenizer is not None:
        require_unicode(name, tail)
        if not isinstance(after, TextEnd):
            after = TextEnd(tokenizer, after, skip_special_tokens=False)
        token_ids = after.encode(tail)
        if not token_ids:
            raise ValueError(f"{name}: expected at least one token, got none from {tail!r}")
        tail = token_ids
    elif is_prompt(tail, name=name) and is_sequence(tail) and isinstance(tail[0], Mapping):
        raise TypeError(f"{name}: expected text or token ids, got a chat")
    return encode_prompt(tokenizer, tail, vocab_size=vocab_size, name=name)


def encode_continuations(
    tokenizer: Any, tails: object, *, after: Sequence[int], vocab_size: int
) -> list[list[int]]:
    """Token ids of several continuations of the same tokens; see `encode_continuation`.

    Raises:
        TypeError, ValueError: no list of them, or an empty one; or one that cannot be used: then
            the error has its place, ``index``.
    """
    name = "continuations"
    if isinstance(tails, (str, bytes)) or not isinstance(tails, Sequence):
        raise TypeError(
            f"{name}: expected a list of texts or token id lists, got "
            f"{type(tails).__name__}; for one, pass a list of one"
        )
    if not tails:
        raise ValueError(f"{name}: expected at least one, got none")
    end: Sequence[int] | TextEnd = after
    if tokenizer is not None and any(isinstance(tail, str) for tail in tails):
        end = TextEnd(tokenizer, after, skip_special_tokens=False)
    encoded: list[list[int]] = []
    for i, tail in enumerate(tails):
        which = f"{name}[{i}]"
        try:
            one = encode_continuation(tokenizer, tail, after=end, vocab_size=vocab_size, name=which)
        except (TypeError, ValueError) as error:
            blame(error, i, [None] * len(tails), name=which)
            raise
        encoded.append(one)
    return encoded
