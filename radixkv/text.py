"""Text in, text out: the one place through which text becomes tokens and tokens text."""

from __future__ import annotations

from radixkv.continuations import encode_continuation, encode_continuations
from radixkv.conversations import (
    Conversation,
    begin_conversation,
    continue_conversation,
    is_chat,
)
from radixkv.prompts import encode_prompt, is_prompt
from radixkv.text_end import TextEnd
from radixkv.text_stream import TextStream
from radixkv.vocabulary import require_tokenizer, tokenizer_lock

__all__ = [
    "Conversation",
    "TextEnd",
    "TextStream",
    "begin_conversation",
    "continue_conversation",
    "encode_continuation",
    "encode_continuations",
    "encode_prompt",
    "is_chat",
    "is_prompt",
    "require_tokenizer",
    "tokenizer_lock",
]
