"""What a prompt is, and its token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.config import require_unicode
from radixkv.text.chats import render_chat
from radixkv.text.vocabulary import encode, vocabulary_of

IdArray: TypeAlias = NDArray[np.integer[Any]] | Tensor
"""Token ids as an integer array: of one dimension a prompt, of two a list of prompts."""
TokenIds: TypeAlias = Sequence[int] | Sequence[np.integer[Any]] | IdArray
"""Token ids of one prompt; an array has one dimension."""
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages ``{"role", "content"}`` for the model's chat template."""
Prompt: TypeAlias = str | TokenIds | Chat
"""Whatever one prompt may be."""


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
    if not is_sequence(obj):
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

    A str gets the special tokens that the tokenizer adds by itself, unless it begins (or ends)
    with them already, as a chat rendered to text does; a chat goes through the tokenizer's chat
    template, with the opening of the answer.

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
    elif is_sequence(prompt) and isinstance(prompt[0], Mapping):
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


def is_sequence(obj: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(obj, Sequence) and not isinstance(obj, (str, bytes, bytearray))


def _kind(item: object) -> str:
    if isinstance(item, Mapping):
        return "messages"
    if isinstance(item, str):
        return "prompts"
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return "prompts" if item.ndim else "token ids"
    return "prompts" if is_sequence(item) else "token ids"


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
    vocabulary = vocabulary_of(tokenizer)
    with vocabulary.lock:
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
        first, last = (vocabulary.special_texts.get(i) for i in (*ids[:1], *ids[-1:]) or (-1, -1))
        begins = first is not None and prompt.lstrip().startswith(first)
        if begins or (last is not None and prompt.rstrip().endswith(last)):
            ids = _without_doubles(tokenizer, prompt)
    return ids


def _without_doubles(tokenizer: Any, prompt: str) -> list[int]:
    """A text's ids, with what the tokenizer adds at either end unless it is there already.

    A chat that was rendered as text begins with the token that most tokenizers add by
    themselves; a model saw it once.
    """
    plain, other = encode(tokenizer, prompt), encode(tokenizer, "a")
    added: list[int] = list(tokenizer("a")["input_ids"])
    num_added = len(added) - len(other)
    places = (i for i in range(num_added + 1) if added[i : i + len(other)] == other)
    num_before = next(places, 0)
    before, after = added[:num_before], added[num_before + len(other) :]
    if before and plain[:1] == before[:1]:
        before = []
    if after and plain[-1:] == after[-1:]:
        after = []
    return [*before, *plain, *after]


def _encode_chat(tokenizer: Any, chat: Sequence[Any], name: str) -> object:
    return render_chat(tokenizer, chat, name, tokenize=True, return_dict=True)["input_ids"]
