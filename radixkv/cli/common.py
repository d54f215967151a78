"""What commands share: their options, the engine that they ask for, errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from radixkv.config import KVConfig
from radixkv.errors import RadixKVError
from radixkv.names import KV_MEANINGS, SAMPLING_MEANINGS, snake_case

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine


# Names of others that mean an option of a command, where that command has it.
_OTHERS = {
    **{name: "capacity" for name, said in KV_MEANINGS.items() if "is capacity" in said},
    **{name: "page_size" for name, said in KV_MEANINGS.items() if "is page_size" in said},
    **{name: "max_new_tokens" for name, said in SAMPLING_MEANINGS.items() if "max_new" in said},
    **dict.fromkeys(("num_beams", "beam_width", "beam_size", "width"), "beams"),
    **dict.fromkeys(("num_return_sequences", "num_samples", "best_of"), "n"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "until"), "stop"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("kv_cache_dtype", "cache_dtype", "dtype"), "kv_dtype"),
    **dict.fromkeys(("model_path", "model_name", "model_id", "pretrained", "checkpoint"), "model"),
    **dict.fromkeys(("prompt_file", "input", "input_file"), "file"),
    **dict.fromkeys(("batch_size", "bs"), "batch"),
    **dict.fromkeys(("seq_len", "context_length", "max_model_len"), "length"),
    "system_prompt": "system",
    **dict.fromkeys(("num_requests", "num_prompts"), "requests"),
    **dict.fromkeys(("num_runs", "runs", "iterations"), "repeats"),
}


class CommandParser(argparse.ArgumentParser):
    """A parser that knows which options were given, and which is meant by one that is not ours.

    The namespace has ``given``: what stood on the command line itself, as a dict of names.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of ``args``; end with an error that says what is meant by an unknown one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(found, unknown)}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; of a command's options those that were given are kept apart."""
        found, unknown = super().parse_known_args(args, namespace)
        if self._subparsers is None:
            defaults = [(action, action.default) for action in self._actions]
            try:
                for action in self._actions:
                    action.default = argparse.SUPPRESS
                given, _ = super().parse_known_args(args, argparse.Namespace())
            finally:
                for action, default in defaults:
                    action.default = default
            own = {action.dest for action in self._actions}
            found.given = {name: value for name, value in vars(given).items() if name in own}
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Write the error, with what a wrong choice may have meant, and exit with 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong is not None:
            choices = [choice.strip("' ") for choice in wrong[2].split(",")]
            like = difflib.get_close_matches(wrong[1].lower(), choices, n=1)
            message += f"; did you mean {like[0]}?" if like else ""
        super().error(message)

    def _meant(self, found: argparse.Namespace, unknown: Sequence[str]) -> str:
        """What is meant by unknown options, each as the end of a sentence."""
        command = self._command(found)
        ours = {
            option.lstrip("-").replace("-", "_"): option
            for action in command._actions
            for option in action.option_strings
        }
        said = ""
        for text in unknown:
            if not text.startswith("-"):
                continue
            option = text.partition("=")[0]
            plain = snake_case(option.lstrip("-"))
            meant = ours.get(_OTHERS.get(plain, plain))
            if meant is None:
                like = difflib.get_close_matches(plain, ours, n=1, cutoff=0.7)
                meant = ours[like[0]] if like else None
            if meant is not None:
                said += f"; for {option} did you mean {meant}?"
        return said

    def _command(self, found: argparse.Namespace) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser: argparse.ArgumentParser = action.choices[found.command]
                return parser
        return self


def require_used(
    arguments: argparse.Namespace, used: Collection[str], beside: str, *, mend: str
) -> None:
    """Raise ValueError if an option was given that has no effect.

    Args:
        used: names of the options that have one.
        beside: what makes the others idle, as the user wrote it.
        mend: what to do.
    """
    for name, value in arguments.given.items():
        if name not in used and name not in ("what", "json", "help"):
            option = "--" + name.replace("_", "-") if name != "prompt" else name
            shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            shown = "" if isinstance(value, bool) else f" {shown}"
            raise ValueError(
                f"{option}: expected none with {beside}, where it has no effect, got "
                f"{option}{shown}; {mend}"
            )


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
    from radixkv.models.small_model import hidden_progress_bars, prepare_small_model

    if model is not None:
        require_model(model)
    name = model if model is not None else str(prepare_small_model(progress=True))
    from radixkv.engine.engine import Engine

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
