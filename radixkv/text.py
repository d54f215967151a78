"""Text in, text out: the one place through which text becomes tokens and tokens text."""

from __future__ import annotations

from radixkv.continuations import encode_continuation, encode_messages
from radixkv.prompts import encode_prompt, is_prompt
from radixkv.text_stream import TextStream
from radixkv.vocabulary import tokenizer_lock

__all__ = [
    "TextStream",
    "encode_continuation",
    "encode_messages",
    "encode_prompt",
    "is_prompt",
    "tokenizer_lock",
]
