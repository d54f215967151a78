"""Errors of calls with many prompts: which prompt one belongs to, and a copy for each request."""

from __future__ import annotations

import copy
import threading
from typing import Any, cast

from radixkv.errors import RadixKVError

_lock = threading.Lock()


def copy_of(error: BaseException) -> BaseException:
    """The same error as another object: type, arguments, attributes, notes, cause and traceback.

    To raise an error that something else keeps makes a cycle through the frames that it passes,
    and these hold all their locals until the garbage is collected. A copy belongs to its catcher
    alone. What cannot be copied comes back itself.
    """
    twin: Any
    try:
        twin = copy.copy(error)
    except Exception:  # a constructor that wants other arguments than it keeps
        twin = None
    if type(twin) is not type(error) or twin is error:
        try:
            twin = type(error).__new__(type(error), *error.args)
            twin.__dict__.update(error.__dict__)
        except Exception:
            return error
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        twin.__notes__ = list(notes)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return cast(BaseException, twin.with_traceback(error.__traceback__))


def blame(error: BaseException, index: int, results: list[Any], *, name: str) -> BaseException:
    """``error`` as that of one item of a call, to be raised or returned.

    It gets ``index`` (which item) and ``results`` (of all items, None for what did not finish),
    and its message names the item: in front if the error is ours or ``ValueError`` or
    ``TypeError``, else as a note, since a user's own message may be looked at. An error that
    another item or call has already is copied first.

    Args:
        name: of the item, such as ``"prompts[3]"``; empty if there is but one.
    """
    with _lock:
        had = vars(error).get("index") if "results" in vars(error) else None
        if had is not None:
            error = copy_of(error)
        try:
            error.index, error.results = index, results  # type: ignore[attr-defined]
        except (AttributeError, TypeError):  # its class has such a property
            other = RadixKVError(f"{type(error).__name__}: {error}")
            other.__cause__ = error
            other.index, other.results = index, results  # type: ignore[attr-defined]
            error = other
    if not name:
        return error
    ours = isinstance(error, RadixKVError) or type(error) in (ValueError, TypeError)
    if ours and len(error.args) == 1 and isinstance(error.args[0], str):
        message = error.args[0]
        if had is not None:
            message = message.removeprefix(f"prompts[{had}]: ")
        if not message.startswith(f"{name}:"):
            message = f"{name}: {message}"
        error.args = (message,)
    else:
        error.add_note(f"of {name}")
    return error
