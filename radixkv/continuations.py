"""How text or ids go on where other tokens end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.config import require_unicode
from radixkv.prompts import encode_prompt, is_prompt, is_sequence
from radixkv.text_end import TextEnd


def encode_continuation(
    tokenizer: Any, tail: object, *, after: Sequence[int] | TextEnd, vocab_size: int
) -> list[int]:
    """Token ids of text or ids that go on where other tokens end: no special tokens are added.

    Args:
        tail: text or token ids.
        after: the tokens that stand before, empty where a text begins; for several texts that
            go on at one place, its `TextEnd` (with special tokens kept).
        vocab_size: ids must be below it.
    Raises:
        TypeError, ValueError: as `encode_prompt`; a chat or an empty continuation too.
    """
    name = "continuation"
    if isinstance(tail, str) and tail and tokenizer is not None:
        require_unicode(name, tail)
        if not isinstance(after, TextEnd):
            after = TextEnd(tokenizer, after, skip_special_tokens=False)
        tail = after.encode(tail)
    elif is_prompt(tail, name=name) and is_sequence(tail) and isinstance(tail[0], Mapping):
        raise TypeError("continuation: expected text or token ids, got a chat")
    return encode_prompt(tokenizer, tail, vocab_size=vocab_size, name=name)
