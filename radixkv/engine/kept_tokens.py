"""Tokens for the kept text of a sample that a stop string cut in the middle of a token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from radixkv.text.continuations import encode_continuation
from radixkv.text.text_stream import TextStream

# Where a part of a token has no tokens of its own, it may have with so many before it.
_MORE_TOKENS = 8

logger = logging.getLogger("radixkv")


def kept_tokens(
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    text: str,
    *,
    stop: str,
    skip_special_tokens: bool,
    vocab_size: int,
) -> tuple[int, list[int]]:
    """How a sequence goes on with ``text``, the part of a sample before its stop string.

    Where the stop string begins inside a token, what of it comes before is encoded anew.

    Args:
        prompt_token_ids: what stands before the sample.
        token_ids: all of the sample, those that spell the stop string too.
        text: the sample's.
        stop: the stop string that ended it.
        skip_special_tokens: whether special tokens are left out of ``text``.
    Returns:
        How many of ``token_ids`` are kept, and the ids that stand in place of the others. After
        the prompt they decode to ``text``; where no tokens do (a vocabulary without the
        characters of a part of a token), to its longest beginning at a border of tokens, which
        is said in the log.

    Complexity: a decoding of the sample for each token of the stop string, as a rule.
    """

    def decoded(ids: Sequence[int], *, skip: bool) -> str:
        stream = TextStream(tokenizer, skip_special_tokens=skip, after=prompt_token_ids)
        return stream.push(ids) + stream.finish()

    # The match lies in the text that is shown; or in that with all special tokens in their places
    # if it holds one of them. Where the rest of it goes on with the stop string, it begins.
    wholes = {skip: decoded(token_ids, skip=skip) for skip in {skip_special_tokens, False}}
    shortest = None  # the border before what is left of the text, if none says it all
    says_all = None  # the first border that does
    for num in range(len(token_ids), -1, -1):
        head = {skip: decoded(token_ids[:num], skip=skip) for skip in wholes}
        shown = head[skip_special_tokens]
        if says_all is not None and shown != text:
            return says_all, []  # the stop string begins inside a special token that is left out
        if not text.startswith(shown):
            continue  # beyond the text, or inside a character
        rest = text[len(shown) :]
        is_border = any(
            whole.startswith(head[skip] + rest + stop) for skip, whole in wholes.items()
        )
        if not rest:
            if is_border:
                return num, []
            says_all = num
        if not is_border:
            continue
        if shortest is None:
            shortest = num
        elif num < shortest - _MORE_TOKENS:
            break
        # As what goes on here, or as the middle of a text, if this is the beginning of one.
        for stop_at in (num, len(token_ids)):
            before = [*prompt_token_ids, *token_ids[:stop_at]]
            tail = _spelled(tokenizer, before, rest, vocab_size)
            if tail and decoded([*token_ids[:num], *tail], skip=skip_special_tokens) == text:
                return num, tail
    if says_all is not None:
        return says_all, []
    num = shortest or 0
    logger.warning(
        "a branch ends before %r, a part of a token that the stop string %r cut: the tokenizer "
        "has no tokens that say it",
        text[len(decoded(token_ids[:num], skip=skip_special_tokens)) :],
        stop,
    )
    return num, []


def _spelled(tokenizer: Any, before: list[int], text: str, vocab_size: int) -> list[int]:
    """Ids of ``text`` after ``before``; none where the tokenizer makes none of it."""
    try:
        return encode_continuation(tokenizer, text, after=before, vocab_size=vocab_size)
    except ValueError:
        return []
