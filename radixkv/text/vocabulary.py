"""A tokenizer's own lock, and what is known of its vocabulary.

Fast tokenizers keep settings that a call changes, so two threads in one tokenizer fail or mix
results. Every use of a tokenizer holds that tokenizer's own lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


class Vocabulary:
    """What all users of one tokenizer share.

    Attributes:
        lock: may be taken again by the thread that holds it.
        special_texts: id to text of the tokens that ``skip_special_tokens`` leaves out.
        byte_ids: byte pieces of SentencePiece vocabularies (``<0x0A>``): a decoder takes a run
            of them as one, text if all of it is UTF-8 and U+FFFD for each byte if not.
        content_forms: chat template and role to whether that template iterates over the parts
            of a content; kept by `radixkv.text.chats`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.lock = threading.RLock()
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = {i: str(token) for i, token in added.items() if token.special}
        if not hasattr(tokenizer, "backend_tokenizer"):
            # A tokenizer in Python leaves out those that it has names for, and no others.
            named = getattr(tokenizer, "all_special_ids", None) or ()
            special = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in named}
        self.special_texts: dict[int, str] = special
        self.content_forms: dict[tuple[str, str], bool] = {}
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


def require_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError unless ``tokenizer`` is None or one of transformers (or alike)."""
    is_raw = not callable(tokenizer) and hasattr(tokenizer, "encode_batch")  # of tokenizers
    if tokenizer is None or (
        hasattr(tokenizer, "decode")
        and not is_raw
        and not isinstance(tokenizer, (type, str, bytes))
    ):
        return
    mend = (
        "use transformers.PreTrainedTokenizerFast(tokenizer_object=...)"
        if is_raw
        else "use AutoTokenizer.from_pretrained(...), or Engine.from_pretrained"
    )
    raise TypeError(
        f"tokenizer: expected None or a tokenizer of transformers, got {tokenizer!r:.80} of type "
        f"{type(tokenizer).__name__}; {mend}"
    )


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the tokenizer's `Vocabulary`, the same at every call."""
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


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of ``token_ids``, with every space that they have.

    Complexity: O(tokens).
    """
    with tokenizer_lock(tokenizer):
        text: str = tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of ``text`` as the tokenizer makes them, nothing added."""
    with tokenizer_lock(tokenizer):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
