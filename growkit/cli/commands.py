"""How commands end: with an exit code, and with one sentence if something goes wrong.

That includes what typer refuses itself, and would show in a box.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from growkit.base.errors import InputError, reason
from growkit.base.names import did_you_mean
from growkit.cli.options import expanded
from growkit.cli.output import say, unprinted
from growkit.cli.signals import INTERRUPTED, begin_command
from growkit.planning.operation import config_key_aliases
from growkit.recipe.recipe import operations

USAGE: type[Any] = typer.BadParameter.__bases__[0]
"""The error of a command line that is not understood: of typer or of click, by typer's version."""

NUMBER = re.compile(r"valid (integer|int|number|float)\b")
"""How each version of typer refuses a value that should be a number."""


def command(
    app: typer.Typer, verb: str | None = None, **options: Any
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Add a function to an app as a command.

    Args:
        app: the app.
        verb: the command has the options of this verb's operations.
        **options: for typer.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        options.setdefault("name", function.__name__.removesuffix("_command"))
        added = _guarded(expanded(function, verb))
        app.command(**options)(added)
        return added

    return decorate


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


class ListCommand(TyperCommand):
    """A command whose options with several values take all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        lists = {name for each in self.params if getattr(each, "multiple", 0) for name in each.opts}
        spread: list[str] = []
        option, has_value = "", False
        for number, word in enumerate(args):
            if word == "--":
                spread += args[number:]
                break
            if word.startswith("-"):
                name, sign, _ = word.partition("=")
                option, has_value = (name if name in lists else ""), bool(sign)
            elif option:
                spread += [option] if has_value else []
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)


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
    """What was not understood, and what was meant."""
    name, help_of = getattr(error, "option_name", None), ""
    if error.ctx is not None:
        help_of = f"'{error.ctx.command_path} --help' lists all there is"
        if hasattr(error, "possibilities"):
            meant = _other_command(error.ctx, str(name)) or did_you_mean(
                name, *_options(error.ctx.command), otherwise=help_of, quoted=str
            )
            return f"{error.ctx.command_path} has no option {name}; {meant}"
    wanted, parameter = NUMBER.search(error.message), getattr(error, "param", None)
    if wanted and parameter is not None:
        kind = "a whole number" if wanted[1].startswith("int") else "a number"
        return f"{parameter.opts[-1]} takes {kind}; {help_of}"
    message = " ".join(error.format_message().split()).rstrip(".")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if "; " in message or not help_of else f"{message}; {help_of}"


def _other_command(ctx: Any, name: str) -> str:
    """Which other commands have an option, or which option takes its name; empty if none."""
    commands = getattr(ctx.parent and ctx.parent.command, "commands", {})
    found = [each for each, command in commands.items() if name in _options(command)[0]]
    if found:
        *first, last = found
        several = f"{', '.join(first)} and {last} have" if first else f"{last} has"
        return f"growkit {several} it"
    choosing = {"grow": "--method", "convert": "--to"}.get(ctx.info_name)
    if choosing and name.removeprefix("--") in operations(ctx.info_name):
        return f"did you mean {choosing} {name.removeprefix('--')}?"
    return ""


def _options(command: Any) -> tuple[list[str], dict[str, str]]:
    """Every option in a command's help; and those of sizes, by the names of config keys."""
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    known = [
        name
        for each in shown
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("--")
    ]
    every = [option for each in operations("grow").values() for option in each.options]
    sizes = {
        f"--{key}": f"--{name.replace('_', '-')}" for key, name in config_key_aliases(every).items()
    }
    return known, {alias: name for alias, name in sizes.items() if name in known}


def _guarded(function: Callable[..., Any]) -> Callable[..., None]:
    """A command that ends with an exit code, after a sentence if something goes wrong."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        code = 2
        begin_command()
        try:
            code = _printed(function(*args, **kwargs) or 0)
        except KeyboardInterrupt as interrupt:
            say(f"interrupted: {interrupt}" if interrupt.args else INTERRUPTED)
            code = 130
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # torch and Rust raise some that are no Exception
            known = isinstance(error, InputError | MemoryError | OSError)
            if os.environ.get("GROWKIT_DEBUG") or not known:
                say(traceback.format_exc())
            say(f"error: {_failure(error)}")
        raise typer.Exit(code)

    return guarded


def _failure(error: BaseException) -> str:
    """What failed, and what to do about it."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, MemoryError):
        return "memory ran out; use a machine with more, or compare less at once"
    if isinstance(error, OSError):
        named = isinstance(error.filename, str | bytes)
        file = f"{os.fsdecode(error.filename)}: " if named else ""
        why = error.strerror or reason(error)
        return str(InputError(f"{file}{why}; look after that place, and run this again"))
    return "internal error; please report it with the output above"


def _printed(code: int) -> int:
    """The exit code of a command whose result has been printed.

    Raises:
        InputError: it could not be printed, and is nowhere else.
    """
    why = unprinted()
    if why and code == 0:
        raise InputError(f"{why}; let standard output lead where it can be written")
    if why:  # a broken promise weighs more
        say(f"warning: {why}")
    return code
