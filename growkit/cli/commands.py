"""How commands end, whatever happens: with a sentence and an exit code.

Also what typer itself refuses of a command line, which it would show in a box.
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
from growkit.cli.options import expanded, say
from growkit.cli.signals import INTERRUPTED, begin_command
from growkit.cli.streams import unprinted
from growkit.planning.operation import config_key_aliases
from growkit.recipe.operations import operations

USAGE: type[Any] = typer.BadParameter.__bases__[0]
"""The error of a command line that is not understood: of typer or of click, by typer's version."""


NUMBER = re.compile(r"valid (integer|int|number|float)\b")
"""What typer says of a value that should be a number, in each of its versions."""


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


class OfMany(TyperCommand):
    """A command whose options with several values take all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        several = {
            name for each in self.params if getattr(each, "multiple", False) for name in each.opts
        }
        return super().parse_args(ctx, _spread(args, several))


def _spread(words: list[str], several: set[str]) -> list[str]:
    """The same with such an option before each of its values."""
    spread: list[str] = []
    option, valued = "", False
    for number, word in enumerate(words):
        if word == "--":
            return spread + words[number:]
        if word.startswith("-"):
            name, sign, _ = word.partition("=")
            option, valued = (name if name in several else ""), bool(sign)
        elif option:
            spread += [option] if valued else []
            valued = True
        spread.append(word)
    return spread


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
            meant = _elsewhere(error.ctx, str(name)) or did_you_mean(
                name, known, _called(known), otherwise=help_of, quoted=str
            )
            return f"{error.ctx.command_path} has no option {name}; {meant}"
    wanted, parameter = NUMBER.search(error.message), getattr(error, "param", None)
    if wanted and parameter is not None:
        kind = "a whole number" if wanted[1].startswith("int") else "a number"
        return f"{parameter.opts[-1]} takes {kind}; {help_of}"
    message = " ".join(error.format_message().split()).rstrip(".")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if "; " in message or not help_of else f"{message}; {help_of}"


def _elsewhere(ctx: Any, name: str) -> str:
    """Which other commands have an option, or which option takes its name; empty if none."""
    others = getattr(ctx.parent and ctx.parent.command, "commands", {})
    found = [each for each, command in others.items() if name in _options(command)]
    if found:
        *first, last = found
        several = f"{', '.join(first)} and {last} have" if first else f"{last} has"
        return f"growkit {several} it"
    choosing = {"grow": "--method", "convert": "--to"}.get(ctx.info_name)
    if choosing and name.removeprefix("--") in operations(ctx.info_name):
        return f"did you mean {choosing} {name.removeprefix('--')}?"
    return ""


def _options(command: Any) -> list[str]:
    """Every option of a command that its help shows."""
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    named = [name for each in shown for name in (*each.opts, *each.secondary_opts)]
    return [name for name in named if name.startswith("--")]


def _called(known: list[str]) -> dict[str, str]:
    """What configs call sizes, as people may write it, and the options of these sizes."""
    every = [option for each in operations("grow").values() for option in each.options]
    sizes = {f"--{key}": _written(name) for key, name in config_key_aliases(every).items()}
    return {called: name for called, name in sizes.items() if name in known}


def _written(name: str) -> str:
    return "--" + name.replace("_", "-")


def command(verb: str | None = None) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a command of a function: its options, and a sentence and exit code for what goes wrong.

    Args:
        verb: the verb whose operations' options it has.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        return _guarded(expanded(function, verb))

    return decorate


def _printed(code: int) -> int:
    """The exit code of a command whose result has been printed.

    Raises:
        InputError: it could not be, and there is no other trace of it.
    """
    why = unprinted()
    if why and code == 0:
        raise InputError(f"{why}; let standard output lead where it can be written")
    if why:  # a broken promise weighs more
        say(f"warning: {why}")
    return code


def _refused(error: OSError) -> str:
    """What the system would not do, and to which file."""
    file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{file}{error.strerror or reason(error)}; look after that place, and run this again"


def _guarded(function: Callable[..., int | None]) -> Callable[..., None]:
    """Turn what goes wrong inside a command into a sentence and an exit code."""

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
            if isinstance(error, InputError):
                say(f"error: {error}")
            elif isinstance(error, MemoryError):
                say("error: memory ran out; use a machine with more, or compare less at once")
            elif isinstance(error, OSError):
                say(f"error: {InputError(_refused(error))}")
            else:
                say("error: internal error; please report it with the output above")
        raise typer.Exit(code)

    return guarded
