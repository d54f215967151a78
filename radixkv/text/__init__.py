"""Text in, text out: the one place through which text becomes tokens and tokens text."""

from __future__ import annotations

from radixkv.text.continuations import encode_continuation, encode_continuations
from radixkv.text.conversations import (
    Conversation,
    begin_conversation,
    continue_conversation,
    is_chat,
)
from radixkv.text.prompts import Chat, IdArray, Prompt, TokenIds, encode_prompt, is_prompt
from radixkv.text.text_end import TextEnd
from radixkv.text.text_stream import TextStream
from radixkv.text.vocabulary import require_tokenizer, tokenizer_lock

__all__ = [
    "Chat",
    "Conversation",
    "IdArray",
    "Prompt",
    "TextEnd",
    "TextStream",
    "TokenIds",
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
