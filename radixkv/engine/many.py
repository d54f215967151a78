"""Calls with many prompts: which prompt is which, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch

from radixkv.config import OnError
from radixkv.engine.request import Request
from radixkv.failures import blame
from radixkv.text.prompts import is_prompt, is_sequence

ON_ERROR = get_args(OnError)


def require_on_error(value: object) -> None:
    """Raise ValueError unless ``value`` says what becomes of a prompt that fails."""
    if not isinstance(value, str) or value not in ON_ERROR:
        raise ValueError(
            f"on_error: expected 'raise' (an error with index and results) or 'return' (the "
            f"exception in its prompt's place), got {value!r}"
        )


def split_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and the prompts; these are not checked.

    What holds a prompt is a list of prompts: what else stands in it is a bad one, to be refused
    by its place.

    Raises:
        TypeError, ValueError: neither a prompt nor a list of them; an empty one.

    >>> split_prompts("text"), split_prompts(["text", 5])
    ((True, ['text']), (False, ['text', 5]))
    """
    try:
        is_one = is_prompt(prompts)
    except TypeError:
        if not is_sequence(prompts) or not any(map(_is_prompt_of_a_list, prompts)):
            raise
        is_one = False
    return is_one, [prompts] if is_one else list(prompts)


def _is_prompt_of_a_list(item: object) -> bool:
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return item.ndim > 0
    return isinstance(item, str) or (is_sequence(item) and not isinstance(item, Mapping))


def prompt_name(index: int, is_one: bool) -> str:
    """What errors call a prompt of a call."""
    return "prompt" if is_one else f"prompts[{index}]"


def outcomes_of(made: list[Request | Exception]) -> list[Any]:
    """The result or exception of each; requests forget theirs."""
    return [one.take_outcome() if isinstance(one, Request) else one for one in made]


def deliver(outcomes: list[Any], *, is_one: bool, on_error: str) -> Any:
    """What a call returns for the outcomes (result or exception) of its prompts.

    ``outcomes`` is emptied, so that nothing but its catcher holds an error that is raised.

    Raises:
        Exception: that of the first prompt that failed, with ``index`` and ``results``, unless
            ``on_error`` is ``"return"``.
    """
    failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if failed:
        results = [None if isinstance(o, BaseException) else o for o in outcomes]
        for i in failed if on_error == "return" else failed[:1]:
            # Each has a list of its own: who changes one changes no other.
            name = "" if is_one else prompt_name(i, is_one)
            outcomes[i] = blame(outcomes[i], i, list(results), name=name)
    if not failed or on_error == "return":
        return outcomes[0] if is_one else outcomes
    error = outcomes[failed[0]]
    if len(failed) > 1:
        error.add_note(
            f"{len(failed)} of {len(outcomes)} prompts failed: {', '.join(map(str, failed))}; "
            f"on_error='return' gives the error of each"
        )
    outcomes.clear()
    try:
        raise error
    finally:
        del error  # else this frame, which its traceback holds, would hold it
