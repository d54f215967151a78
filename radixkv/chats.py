"""Chats: messages, checked, and what the tokenizer's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.config import require_unicode
from radixkv.vocabulary import tokenizer_lock


def _require_unicode_all(name: str, value: object) -> None:
    """`require_unicode` for each text in a message, however deep; keys too."""
    waiting = [value]
    seen: set[int] = set()  # a message may hold itself
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            require_unicode(name, one)
        elif isinstance(one, (Mapping, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            waiting += [*one.keys(), *one.values()] if isinstance(one, Mapping) else one


def render_chat(tokenizer: Any, chat: Sequence[Any], name: str, **options: Any) -> Any:
    _require_unicode_all(name, chat)
    for position, message in enumerate(chat):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValueError(
                f'{name}: expected each message to have a "role" of text, got {message!r} at '
                f"position {position}"
            )
        content = message.get("content")
        if not isinstance(content, (str, list, tuple)) and not message.get("tool_calls"):
            raise ValueError(
                f'{name}: expected each message to have a "content" of text, got {message!r} at '
                f"position {position}"
            )
    if tokenizer is None:
        raise TypeError(
            f"{name}: expected token ids, because there is no tokenizer, got a chat; give the "
            "engine a tokenizer or pass ids"
        )
    with tokenizer_lock(tokenizer):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"{name}: expected a tokenizer with a chat_template for a chat, got one without; "
                "set tokenizer.chat_template or pass a str"
            )
        import jinja2  # transformers needs it for templates, this package only then

        try:
            return tokenizer.apply_chat_template(
                [dict(message) for message in chat], add_generation_prompt=True, **options
            )
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as error:
            raise ValueError(
                f"{name}: expected messages that the chat template accepts, got {error}"
            ) from error
