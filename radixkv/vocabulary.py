"""A tokenizer's own lock, and what is known of its vocabulary.

Fast tokenizers keep settings that a call changes, so two threads in one tokenizer fail or mix
results. Every use of a tokenizer holds that tokenizer's own lock.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any


class Vocabulary:
    """What all users of one tokenizer share: its lock, and facts about its vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self.lock = threading.RLock()
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Byte pieces of SentencePiece vocabularies: a decoder takes a run of them as one, text
        # if all of it is UTF-8 and U+FFFD for each byte if not.
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        to_ids = getattr(tokenizer, "convert_tokens_to_ids", None)
        ids = [None] * len(pieces) if to_ids is None else to_ids(pieces)
        self.byte_ids = frozenset(
            token_id
            for piece, token_id in zip(pieces, ids, strict=True)
            if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == piece
        )


_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()
_vocabularies_lock = threading.Lock()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    with _vocabularies_lock:
        found = _vocabularies.get(tokenizer)
        if found is None:
            found = _vocabularies[tokenizer] = Vocabulary(tokenizer)
        return found


def tokenizer_lock(tokenizer: Any) -> AbstractContextManager[object]:
    """Return the tokenizer's lock, the same at every call; hold it around any use of it.

    It may be taken again by the thread that holds it.
    """
    return vocabulary_of(tokenizer).lock
