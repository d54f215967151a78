"""Chats: messages, checked, and what the tokenizer's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.config import require_unicode
from radixkv.text.vocabulary import tokenizer_lock, vocabulary_of

# What a content's part is called that has a "text" and is nothing but text.
_TEXT_KINDS = ("text", "input_text", "output_text")

# Passes through a template as it is, whatever filters for case or white space are in it.
MARK = "\N{OBJECT REPLACEMENT CHARACTER}7\N{OBJECT REPLACEMENT CHARACTER}"


def render_chat(
    tokenizer: Any,
    chat: Sequence[Any],
    name: str,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> Any:
    """What the tokenizer's chat template makes of ``chat``, with the opening of the answer.

    Args:
        chat: messages. A content in parts is joined to a text, or handed to the template in
            parts where it iterates over them.
        name: what errors call it.
        options: of ``apply_chat_template``: ``tokenize=False`` gives text.
    Raises:
        TypeError: no tokenizer.
        ValueError: no template; a message without a role or content, or with a part that is no
            text; what the template itself refuses.
    """
    messages = [_checked(message, i, name) for i, message in enumerate(chat)]
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
        for message in messages:
            if message.get("content") and _wants_parts(tokenizer, message["role"]):
                message["content"] = _as_parts(message["content"])
        options["add_generation_prompt"] = add_generation_prompt
        try:
            return tokenizer.apply_chat_template(messages, **options)
        except _template_errors() as error:
            refusal = error
        silent = [message for message in messages if message.get("content") is None]
        try:
            if silent:  # a turn of calls alone, in a template that prints every content
                for message in silent:
                    message["content"] = ""
                return tokenizer.apply_chat_template(messages, **options)
        except _template_errors():
            pass  # it was not for this: the first refusal says more
        raise ValueError(
            f"{name}: expected messages that the chat template accepts, got {refusal}"
        ) from refusal


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template raises about the messages that it is given."""
    import jinja2  # transformers needs it for templates, this package only then

    return (jinja2.TemplateError, TypeError, AttributeError, LookupError)


def _checked(message: Mapping[str, Any], position: int, name: str) -> dict[str, Any]:
    """A copy of a message with its content as one text; without one where there is none."""
    _require_unicode_all(name, message)
    checked = dict(message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f'{name}: expected each message to have a "role" of text, got {message!r} at '
            f"position {position}"
        )
    if isinstance(content, (list, tuple)):
        texts = [_text_of(part, i, position, name) for i, part in enumerate(content)]
        checked["content"] = "".join(texts)
    elif content is None and (role == "assistant" or message.get("tool_calls")):
        checked.pop("content", None)
    elif not isinstance(content, str):
        raise ValueError(
            f'{name}: expected each message to have a "content" of text, got {message!r} at '
            f"position {position}"
        )
    return checked


def _text_of(part: object, place: int, position: int, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = type(part).__name__
    if isinstance(part, Mapping):
        text = part.get("text")
        kind = str(part.get("type", "text" if "text" in part else "without a type"))
        if kind in _TEXT_KINDS and isinstance(text, str):
            return text
        if kind in _TEXT_KINDS:
            kind = f"{kind} whose text is of type {type(text).__name__}"
    raise ValueError(
        f"{name}: expected the content of message {position} to be text, got at part {place} "
        f"one of kind {kind}; leave it out or say it in text"
    )


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _wants_parts(tokenizer: Any, role: str) -> bool:
    """Whether the template takes the content of such messages in parts alone.

    A template that iterates over parts loses a text without a word. So one is tried, once.
    """
    forms = vocabulary_of(tokenizer).content_forms
    key = (str(tokenizer.chat_template), role)
    if key not in forms:
        forms[key] = not _shows_mark(tokenizer, role, MARK) and _shows_mark(
            tokenizer, role, _as_parts(MARK)
        )
    return forms[key]


def _shows_mark(tokenizer: Any, role: str, content: object) -> bool:
    """Whether a chat in which ``role`` says ``content``, the mark, is rendered with the mark."""
    other = "-" if isinstance(content, str) else _as_parts("-")
    user = {"role": "user", "content": other}
    if role in ("user", "system", "developer"):
        before, after = [], [user] if role != "user" else []
    elif role == "assistant":
        before, after = [user], []
    else:
        call = invented_call("000000000")
        before, after = [user, {"role": "assistant", "content": other, "tool_calls": [call]}], []
    said = {"role": role, "content": content, "tool_call_id": "000000000"}
    try:
        rendered = tokenizer.apply_chat_template([*before, said, *after], tokenize=False)
    except _template_errors():
        return False  # which is the answer: not in this form
    return MARK in str(rendered)


def invented_call(call_id: str, name: str = "function") -> dict[str, Any]:
    """A tool call for templates that look at the call before its answer."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}


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
