"""Tool calls in a generated text, in the formats of Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from typing import Any

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL, _PYTHON_TAG = "[TOOL_CALLS]", "<|python_tag|>"


def find_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an assistant's text into what it says and the tools that it calls.

    Returns:
        The text without the calls; the calls, each ``{"type": "function", "function": {"name",
        "arguments": dict}}``. Text in which any call cannot be read is returned whole, with
        none.

    >>> find_tool_calls('So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')[1]
    [{'type': 'function', 'function': {'name': 'f', 'arguments': {'x': 1}}}]
    """
    if "<tool_call>" in text:
        calls = [_as_call(_as_json(body)) for body in _HERMES.findall(text)]
        rest = _HERMES.sub("", text)
    elif _MISTRAL in text:
        rest, _, body = text.partition(_MISTRAL)
        listed = _as_json(body)
        if isinstance(listed, list):
            calls = [_as_call(one) for one in listed]
        else:  # name{...}, or name[ARGS]{...}, once for each call
            pairs = (part.partition("{") for part in body.split(_MISTRAL))
            calls = [
                _as_call({"name": n.replace("[ARGS]", "").strip(), "arguments": _as_json(b + a)})
                for n, b, a in pairs
            ]
    else:
        body = text.strip().removeprefix(_PYTHON_TAG).strip()
        rest = ""
        parts = _objects(body) if body.startswith("{") else []
        calls = [_as_call(one) for one in parts] or [None]
    found = [call for call in calls if call is not None]
    if not found or len(found) < len(calls):
        return text, []
    return rest.strip(), found


def _as_json(text: str) -> Any:
    """What ``text`` says as JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _objects(text: str) -> list[Any]:
    """JSON values one after another, with ``;`` between them; empty if there is more."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return []
        values.append(value)
        while at < len(text) and text[at] in "; \n":
            at += 1
    return values


def _as_call(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _as_json(arguments)
    if not isinstance(arguments, dict):
        return None
    return {"type": "function", "function": {"name": value["name"], "arguments": arguments}}
