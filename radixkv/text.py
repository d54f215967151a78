"""Text in, text out: what a prompt is, its token ids, and text from tokens as they come.

Fast tokenizers keep settings that a call changes, so two threads in one tokenizer fail or mix
results. Every use of a tokenizer here holds that tokenizer's own lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np
import torch

from radixkv.config import require_unicode

# A window of tokens is decoded again at each push. Past this many it is cut to its last tokens.
_WINDOW = 24
# The cut window must give this many characters of text that the longer one gave: then its first
# token (whose space or mark a decoder may treat in its own way) and a character cut in two
# (at most 4 bytes) are behind what is still held.
_OVERLAP = 8

_NO_CHARACTER = "\ufffd"


class _Shared:
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


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _share(tokenizer: Any) -> _Shared:
    with _shared_lock:
        found = _shared.get(tokenizer)
        if found is None:
            found = _shared[tokenizer] = _Shared(tokenizer)
        return found


def tokenizer_lock(tokenizer: Any) -> AbstractContextManager[object]:
    """Return the tokenizer's lock, the same at every call; hold it around any use of it.

    It may be taken again by the thread that holds it.
    """
    return _share(tokenizer).lock


def is_prompt(obj: object, *, name: str = "prompt") -> bool:
    """Tell one prompt (True) from a list of prompts (False); the prompts are not checked.

    One prompt is a str, a sequence of ids (a 1-D array or tensor too) or a chat, a list of
    mappings. The prompts of a list may be of different kinds.

    Raises:
        TypeError: neither; or a list that mixes ids or messages with something else.
        ValueError: an empty list.

    >>> is_prompt("text"), is_prompt([1, 2]), is_prompt([{"role": "user", "content": "hi"}])
    (True, True, True)
    >>> is_prompt(["text", [1, 2]])
    False
    """
    if isinstance(obj, str):
        return True
    if isinstance(obj, (np.ndarray, torch.Tensor)):
        if obj.ndim not in (1, 2):
            raise TypeError(
                f"{name}: expected a 1-D array of token ids, or 2-D for a list of prompts, "
                f"got {obj.ndim} dimensions of shape {list(obj.shape)}"
            )
        return obj.ndim == 1
    if not _is_sequence(obj):
        raise TypeError(
            f"{name}: expected a str, a sequence of token ids, a chat (a list of messages), or a "
            f"list of these, got {type(obj).__name__}"
        )
    if len(obj) == 0:
        raise ValueError(f"{name}: expected at least one prompt or token id, got an empty sequence")
    kinds = {_kind(item) for item in obj}
    if len(kinds) > 1:
        raise TypeError(
            f"{name}: expected all of token ids, all of messages or all of prompts, got a mix of "
            f"{' and '.join(sorted(kinds))}; put each prompt in its own list"
        )
    return kinds != {"prompts"}


def encode_prompt(
    tokenizer: Any, prompt: object, *, vocab_size: int, name: str = "prompt"
) -> list[int]:
    """Return the token ids of one prompt.

    A str gets the special tokens that the tokenizer adds by itself; a chat goes through the
    tokenizer's chat template, with the opening of the answer.

    Args:
        tokenizer: of transformers; None where prompts are ids.
        prompt: str, ids (list, tuple, array, tensor) or chat.
        vocab_size: ids must be below it.
        name: what errors call it.
    Raises:
        TypeError: a str or chat without a tokenizer; an id that is not an integer; a prompt of
            another type.
        ValueError: an empty prompt; an id below 0 or from vocab_size on; a chat without a
            template, or whose messages are not as the template wants them.
    """
    if not is_prompt(prompt, name=name):
        raise TypeError(f"{name}: expected one {name}, got a list of {name}s")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{name}: expected text, got an empty str")
        ids: object = _encode_text(tokenizer, prompt, name)
    elif _is_sequence(prompt) and isinstance(prompt[0], Mapping):
        ids = _encode_chat(tokenizer, prompt, name)
    else:
        ids = prompt
    token_ids = _as_ids(ids, name)
    if not token_ids:
        raise ValueError(f"{name}: expected at least one token, got none from {prompt!r}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        position, value = next(
            (i, value) for i, value in enumerate(token_ids) if not 0 <= value < vocab_size
        )
        raise ValueError(
            f"{name}: expected token ids from 0 to {vocab_size - 1}, got {value} at position "
            f"{position}; use the model's own tokenizer"
        )
    return token_ids


class TextStream:
    """The text of one sample, as its tokens come.

    What was returned is never taken back: a character waits until its last byte is there, and
    text that may become a stop string waits until it can't. The pieces joined are the decoding
    of all tokens, cut before the stop string if one matched. The match that ends first wins, of
    those the longest; so the same text stops at the same place, whatever tokens it came in.

    A run of byte pieces (``<0x0A>``, SentencePiece) waits for its end, because one wrong byte
    makes the decoder turn all of it into U+FFFD.

    Args:
        tokenizer: of transformers; None gives no text.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text; none is ever part of it.
        after: the tokens that stand before: what they make of the first token counts.
    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.

    Attributes:
        stopped: the stop string that matched, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        after: Sequence[int] = (),
    ) -> None:
        if tokenizer is None and stop:
            raise ValueError(
                f"stop: expected none without a tokenizer, got {list(stop)}; give the engine a "
                f"tokenizer or use stop_token_ids"
            )
        if not all(stop):
            raise ValueError(f"stop: expected strings that are not empty, got {list(stop)}")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._shared = None if tokenizer is None else _share(tokenizer)
        self._pieces: list[str] = []
        self._held = ""  # decoded, but may be the start of a stop string
        self._window: list[int] = []  # last tokens; what was before them is decoded for good
        self._num_taken = 0  # characters of the window's text that went on
        self._max_window = _WINDOW
        self._finished = False

    @property
    def text(self) -> str:
        """All that was returned so far, joined."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now safe to show.

        Raises:
            ValueError: after ``finish``.

        Complexity: O(tokens pushed), whatever came before.
        """
        if self._finished:
            raise ValueError("push: the stream is finished; make a TextStream for each sample")
        shared = self._shared
        if shared is None or self.stopped is not None:
            return ""
        if self._skip_special_tokens:
            token_ids = [i for i in token_ids if i not in shared.special_ids]
        if not token_ids:
            return ""
        self._window += token_ids
        if self._window[-1] in shared.byte_ids:
            return ""
        decoded = self._decode(self._window)
        settled = len(decoded) - decoded.endswith(_NO_CHARACTER)
        fresh = decoded[self._num_taken : settled]
        self._num_taken = max(self._num_taken, settled)
        if len(self._window) > self._max_window:
            self._cut_window(decoded)
        return self._pass_on(fresh)

    def finish(self) -> str:
        """Return what is still held: the end of the text.

        A character whose last bytes never came is what the tokenizer makes of it, U+FFFD as a
        rule. A second call returns nothing.
        """
        if self._finished:
            return ""
        self._finished = True
        if self._shared is None or self.stopped is not None:
            return ""
        fresh = self._decode(self._window)[self._num_taken :] if self._window else ""
        out = self._pass_on(fresh)
        if self.stopped is None and self._held:
            self._pieces.append(self._held)
            out += self._held
            self._held = ""
        return out

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._shared is not None
        with self._shared.lock:
            text: str = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text

    def _cut_window(self, decoded: str) -> None:
        """Keep the window's last tokens, as few as decode to the same end of text."""
        num_kept = _OVERLAP
        num_open = len(decoded) - self._num_taken
        while num_kept < len(self._window):
            shorter = self._decode(self._window[-num_kept:])
            overlap = _OVERLAP + num_open
            if len(shorter) > overlap and shorter[-overlap:] == decoded[-overlap:]:
                self._window = self._window[-num_kept:]
                self._num_taken = len(shorter) - num_open
                self._max_window = max(_WINDOW, 2 * num_kept)
                return
            num_kept *= 2
        # Tokens without text, or a decoder that looks far back: try again at twice the length,
        # so that the cost stays proportional to the tokens.
        self._max_window = 2 * len(self._window)

    def _pass_on(self, fresh: str) -> str:
        """Look for stop strings in what is held and ``fresh``; return what is safe to show."""
        buffer = self._held + fresh
        matches = [
            (at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0
        ]
        if matches:
            _, at, self.stopped = min(matches)
            self._held = ""
            self._window = []
            out = buffer[:at]
        else:
            num_held = self._num_maybe_stop(buffer)
            out = buffer[: len(buffer) - num_held]
            self._held = buffer[len(buffer) - num_held :]
        if out:
            self._pieces.append(out)
        return out

    def _num_maybe_stop(self, buffer: str) -> int:
        """Return the length of the longest end of ``buffer`` that starts a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for num in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-num:]
            if any(stop.startswith(end) for stop in self._stop):
                return num
        return 0


def _is_sequence(obj: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(obj, Sequence) and not isinstance(obj, (str, bytes, bytearray))


def _kind(item: object) -> str:
    if isinstance(item, Mapping):
        return "messages"
    if isinstance(item, str):
        return "prompts"
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return "prompts" if item.ndim else "token ids"
    return "prompts" if _is_sequence(item) else "token ids"


def _as_ids(ids: object, name: str) -> list[int]:
    """Return ids as ints; TypeError names what is no integer and where."""
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        if isinstance(ids, torch.Tensor):
            integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        else:
            integer = ids.dtype.kind in "iu"
        if not integer:
            raise TypeError(f"{name}: expected an array of integers, got dtype {ids.dtype}")
        values: list[int] = ids.tolist()
        return values
    assert isinstance(ids, Sequence)
    return [item if type(item) is int else _as_id(item, i, name) for i, item in enumerate(ids)]


def _as_id(item: object, position: int, name: str) -> int:
    if isinstance(item, (np.ndarray, torch.Tensor)) and item.ndim == 0:
        item = item.item()
    if isinstance(item, (bool, np.bool_)) or not isinstance(item, Integral):
        raise TypeError(
            f"{name}: expected an integer token id at position {position}, got {item!r} of type "
            f"{type(item).__name__}"
        )
    return int(item)


def _encode_text(tokenizer: Any, prompt: str, name: str) -> object:
    if tokenizer is None:
        raise TypeError(
            f"{name}: expected token ids, because there is no tokenizer, got a str; give the "
            "engine a tokenizer or pass ids"
        )
    require_unicode(name, prompt)
    with tokenizer_lock(tokenizer):
        return tokenizer(prompt)["input_ids"]


def _encode_chat(tokenizer: Any, chat: Sequence[Any], name: str) -> object:
    return _render_chat(tokenizer, chat, name, tokenize=True, return_dict=True)["input_ids"]


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


def _render_chat(tokenizer: Any, chat: Sequence[Any], name: str, **options: Any) -> Any:
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
    elif is_prompt(tail, name=name) and _is_sequence(tail) and isinstance(tail[0], Mapping):
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
    rendered = _render_chat(tokenizer, [*opening, *messages], "messages", tokenize=False)
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
