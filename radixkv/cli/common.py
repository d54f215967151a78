"""What commands share: their options, the engine that they ask for, errors in one line."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from radixkv.config import KV_DTYPES, KVConfig, require_choice
from radixkv.errors import RadixKVError
from radixkv.names import KV_MEANINGS, SAMPLING_MEANINGS, snake_case

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

Function = TypeVar("Function", bound=Callable[..., Any])

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


class Choice(click.Choice[str]):
    """One of several words; a wrong one is refused as this library's own options refuse it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return ``value``.

        Raises:
            ValueError: it is none of the words.
        """
        require_choice(param.opts[0] if param else "value", value, self.choices)
        return str(value)


class Command(click.Command):
    """A command whose function takes its arguments in one piece, see `read_arguments`.

    An unknown option is refused with the one that is meant, also where that has another name in
    another library.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            said = f"unrecognized option: {error.option_name}"
            meant = self._meant(error.option_name)
            said += f"; for {error.option_name} did you mean {meant}?" if meant else ""
            raise click.UsageError(said, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command's function."""
        assert self.callback is not None
        return ctx.invoke(self.callback, read_arguments(ctx))

    def _meant(self, option: str) -> str | None:
        ours = {
            name.lstrip("-").replace("-", "_"): name
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }
        plain = snake_case(option.lstrip("-"))
        plain = _OTHERS.get(plain, plain)
        begun = [name for name in ours if name.startswith(plain)]
        like = [plain] if plain in ours else begun or difflib.get_close_matches(plain, ours, 1, 0.7)
        return ours[like[0]] if like else None


def read_arguments(context: click.Context) -> SimpleNamespace:
    """All arguments by their names; and ``given``, a dict of those on the command line itself."""
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return SimpleNamespace(**context.params, given=given)


json_option = click.option("--json", is_flag=True, help="print JSON, for machines")
model_option = click.option(
    "--model",
    help="folder or hub id of a transformers causal LM (default: a small chat model, "
    "prepared at the first use)",
)


def engine_options(function: Function) -> Function:
    """Add the options that say which model is loaded, and how its pages are kept."""
    for option in (
        click.option("--capacity", help='bytes for KV pages, such as "512MiB"'),
        click.option(
            "--kv-dtype",
            default="int8",
            metavar="DTYPE",
            help=f"one of {', '.join(KV_DTYPES)} (int8)",
        ),
        model_option,
    ):
        function = option(function)
    return function


def read_text(option: str, path: Path) -> str:
    """Read a file that the user named.

    Raises:
        ValueError: it is not there, or no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: expected a readable UTF-8 text file; {error}") from error


def require_used(
    arguments: SimpleNamespace, used: Collection[str], beside: str, *, mend: str
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


def one_line(error: object) -> str:
    """What an error says, without line breaks."""
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
