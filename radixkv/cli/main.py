"""The command `radixkv`: which commands there are, and how errors are said.

A command is an entry of `_COMMANDS` and the file of its name, which is imported when the command is
asked for: `radixkv --help` needs neither PyTorch nor even this library's own options.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

import click

from radixkv.errors import RadixKVError
from radixkv.version import __version__

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_COMMANDS = {
    "demo": "Ask a real model about one document, sample and beam search.",
    "generate": "Print what a model says after a prompt.",
    "calc": "Say how much memory the KV of a model takes.",
    "quality": "Measure what each KV format costs a model in accuracy.",
    "bench": "Time the cache, the kernels, or whole workloads.",
    "snapshot": "Look into, verify or merge saved caches.",
}


class Commands(click.Group):
    """The commands, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name.

        Raises:
            ValueError: there is none; says which one may be meant.
        """
        if cmd_name not in _COMMANDS and not cmd_name.startswith("-"):
            from radixkv.config import require_choice

            require_choice("COMMAND", cmd_name, list(_COMMANDS))
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"radixkv.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=Commands, no_args_is_help=False)
@click.version_option(__version__, message="radixkv %(version)s")
def commands() -> None:
    """A radix-tree prefix cache with quantized KV pages."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for bad input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(message)s")  # a program shows its library's warnings
    try:
        status = commands.main(arguments, prog_name="radixkv", standalone_mode=False)
        sys.stdout.flush()
    except (click.ClickException, RadixKVError, ValueError, TypeError) as error:
        from radixkv.cli.common import one_line

        said = error.format_message() if isinstance(error, click.ClickException) else error
        where = " ".join(["radixkv", *(name for name in arguments[:1] if name in _COMMANDS)])
        print(f"{where}: error: {one_line(said)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except click.Abort:  # click's word for a KeyboardInterrupt
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status or 0
