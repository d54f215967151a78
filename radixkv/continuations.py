"""How text, ids or messages go on where other tokens end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixkv.chats import render_chat
from radixkv.config import require_unicode
from radixkv.prompts import encode_prompt, is_prompt, is_sequence
from radixkv.vocabulary import tokenizer_lock


def encode_continuation(
    tokenizer: Any, tail: object, *, after: Sequence[int], vocab_size: int
) -> list[int]:
    """Token ids of text or ids that go on where other tokens end: no special tokens are added.

    Args:
        tail: text or token ids.
        after: the tokens that stand before; empty where a text begins.
        vocab_size: ids must be below it.
    Raises:
        TypeError, ValueError: as `encode_prompt`; a chat or an empty continuation too.
    """
    name = "continuation"
    if isinstance(tail, str) and tail and tokenizer is not None:
        require_unicode(name, tail)
        with tokenizer_lock(tokenizer):
            tail = list(tokenizer(tail, add_special_tokens=False)["input_ids"])
    elif is_prompt(tail, name=name) and is_sequence(tail) and isinstance(tail[0], Mapping):
        raise TypeError("continuation: expected text or token ids, got a chat")
    return encode_prompt(tokenizer, tail, vocab_size=vocab_size, name=name)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    last_token_id: int,
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> list[int]:
    """Token ids by which the chat template continues a conversation with ``messages``.

    They begin where the assistant's last turn ends, with what closes it (unless that is the
    token that the conversation ends with already), and end with the opening of its next turn.

    Args:
        last_token_id: the last token of the conversation so far.
        eos_token_ids: tokens that close an assistant's turn.
    Raises:
        TypeError, ValueError: as `encode_prompt` for a chat; or a template that does not render
            the assistant's text as it is, so that the continuation cannot be told.
    """
    mark = "\N{OBJECT REPLACEMENT CHARACTER}radixkv\N{OBJECT REPLACEMENT CHARACTER}"
    opening = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
    rendered = render_chat(tokenizer, [*opening, *messages], "messages", tokenize=False)
    _before, found, text = rendered.partition(mark)
    if not found or mark in text:
        raise ValueError(
            "messages: expected a chat template that renders the assistant's text once, as it "
            "is; append text or token ids instead"
        )
    with tokenizer_lock(tokenizer):
        if last_token_id in eos_token_ids:
            text = text.removeprefix(tokenizer.decode([last_token_id]))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encode_prompt(None, list(ids), vocab_size=vocab_size, name="messages")
