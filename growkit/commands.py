"""What typer refuses of a command line, in a sentence like all others, and without its box."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from growkit.errors import InputError
from growkit.names import did_you_mean
from growkit.operations import operations
from growkit.options import say
from growkit.planning.operation import callings

USAGE: type[Any] = typer.BadParameter.__bases__[0]
"""The error of a command line that is not understood: of typer or of click, by typer's version."""


class Commands(TyperGroup):
    """A group of commands."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """See ``click.Command``."""
        with _in_a_sentence():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """See ``click.Command``."""
        with _in_a_sentence():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See ``click.Group``."""
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name):
            return super().resolve_command(ctx, args)
        meant = did_you_mean(name, self.list_commands(ctx))
        raise USAGE(f"there is no command {name!r}; {meant}", ctx)


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    try:
        yield
    except USAGE as error:
        if "NoArgsIsHelp" in type(error).__name__:  # which shows the help
            raise
        say(f"error: {InputError(_sentence(error))}")
        raise typer.Exit(2) from None


def _sentence(error: Any) -> str:
    """What was not understood, and what was meant or where that stands."""
    name, help_of = getattr(error, "option_name", None), ""
    if error.ctx is not None:
        help_of = f"'{error.ctx.command_path} --help' lists all there is"
        if hasattr(error, "possibilities"):
            known = _options(error.ctx.command)
            meant = did_you_mean(name, known, _called(known), otherwise=help_of, quoted=str)
            return f"{error.ctx.command_path} has no option {name}; {meant}"
    message = " ".join(error.format_message().split()).rstrip(".")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if "; " in message or not help_of else f"{message}; {help_of}"


def _options(command: Any) -> list[str]:
    """Every option of a command that its help shows."""
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    named = [name for each in shown for name in (*each.opts, *each.secondary_opts)]
    return [name for name in named if name.startswith("--")]


def _called(known: list[str]) -> dict[str, str]:
    """What configs call sizes, as people may write it, and the options of these sizes."""
    every = [option for each in operations("grow").values() for option in each.options]
    sizes = {f"--{key}": _written(name) for key, name in callings(every).items()}
    return {called: name for called, name in sizes.items() if name in known}


def _written(name: str) -> str:
    return "--" + name.replace("_", "-")
