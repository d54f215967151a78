"""What commands share: the engine that they ask for, and errors in one line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.config import KVConfig
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from radixkv.engine import Engine


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def require_model(name: str) -> None:
    """Refuse what reads like a path and leads nowhere, before a hub is asked for it."""
    path = Path(name)
    if (path.is_absolute() or name.startswith(".") or len(path.parts) > 2) and not path.exists():
        raise ValueError(
            f"--model: expected a folder or a hub id, got {name!r}; there is no such folder"
        )


def load_engine(model: str | None, config: KVConfig) -> Engine:
    """Load the model that ``--model`` names, or the small one, and build an engine around it.

    Raises:
        RadixKVError: there is no such model.
    """
    from radixkv.models import hidden_progress_bars, prepare_small_model

    if model is not None:
        require_model(model)
    name = model if model is not None else str(prepare_small_model(progress=True))
    from radixkv.engine import Engine

    # Only a download is worth a bar.
    hidden = hidden_progress_bars() if Path(name).is_dir() else contextlib.nullcontext()
    try:
        with hidden:
            return Engine.from_pretrained(name, kv=config)
    except OSError as error:  # how transformers says that it found no model
        raise RadixKVError(
            f"--model: expected the folder or hub id of a transformers causal LM, got {name!r}; "
            f"{one_line(error)}"
        ) from error
