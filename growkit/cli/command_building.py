"""Conversion of functions to commands: options, results on stdout, exit codes.

A failure prints one sentence on stderr, also for mistakes that typer would print in a box. Either
stream may be closed or full without any effect on the work. A command whose only result is its
output fails if that was lost.
"""

import dataclasses
import errno
import functools
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from growkit.base.errors import InputError, plain, reason
from growkit.base.names import did_you_mean
from growkit.base.options import Option, option, options_of
from growkit.cli.signals import INTERRUPTED, begin_command
from growkit.model.checkpoint.folder import check_name
from growkit.planning.operation import SizeOption, config_key_aliases, operations
from growkit.planning.recipe import Recipe, shipped_recipes

USAGE: type[Any] = typer.BadParameter.__bases__[0]
"""The error of an invalid command line: typer's or click's, depending on typer's version."""

_output_errors: list[str] = []
"""Errors of standard output, until ``unprinted`` reports them."""


# Options.

PATHS = ("SRC", "OUT", "FILE", "PATH", "FOLDER", "RECIPE", "RECIPE…")
"""Placeholders of values that are paths."""


class OperationOptions(dict[str, Any]):
    """The options of a verb's operations."""


class RecipeOptions(dict[str, Any]):
    """The fields of a recipe that are options."""


@dataclasses.dataclass(frozen=True)
class Destination:
    """Destination of a result."""

    report: Path | None = option(
        None, "Write the result as one HTML page (.html), a card (.md) or .json.", "FILE"
    )
    json: bool = option(False, "Print the result as JSON on stdout.")


def parse_path(text: str) -> Path:
    """Convert a command-line value to a path."""
    try:
        check_name(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    return Path(text)


def _value_settings(form: str, values: Iterable[str]) -> dict[str, Any]:
    """Placeholder, parser and shell completion of a value, as typer takes them."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in values if choice.startswith(incomplete)]

    parser = parse_path if form in PATHS else None
    return {"metavar": form or None, "parser": parser, "autocompletion": values and complete}


def value(default: Any, text: str, form: str = "", values: Iterable[str] = ()) -> Any:
    """An option with a value.

    Args:
        default: value without the option; ``...`` if the option is required.
        text: one line of help.
        form: placeholder of the value, e.g. ``FILE``.
        values: values for shell completion.
    """
    return typer.Option(default, help=text, **_value_settings(form, values))


def flag(name: str, text: str) -> Any:
    """An option without a value."""
    return typer.Option(False, name, help=text)


def argument(form: str, text: str, values: Iterable[str] = (), default: Any = ...) -> Any:
    """An argument; see ``value``."""
    shown = default is not None
    return typer.Argument(default, help=text, show_default=shown, **_value_settings(form, values))


SHIPPED = tuple(shipped_recipes())
"""Names of the recipes that ship with growkit."""

SOURCE = argument("SRC", "Model folder: config.json and weights; or hf://ORG/NAME@REVISION.")
OUTPUT = argument("OUT", "Folder to create.")
RECIPE = argument(
    "RECIPE",
    "Recipe (YAML), growkit.json of a model, or a name of `growkit recipes list`.",
    SHIPPED,
)
FAMILY = value(None, "YAML that describes SRC's family, if growkit does not know it.", "FILE")
JSON = flag("--json", "Print the result as JSON on stdout.")
NO_VERIFY = typer.Option(
    True, " /--no-verify", help="Publish OUT without the proof.", show_default=False
)


def flag_of(name: str) -> str:
    """The flag of an option, e.g. ``--max-kl``."""
    return "--" + name.replace("_", "-")


def field_option(kind: type, name: str) -> Any:
    """The typer option of a dataclass's field."""
    return _shown(options_of(kind)[name], getattr(kind, name))


def _shown(option: Option, default: Any = None, **more: Any) -> Any:
    """An option as typer takes it."""
    return typer.Option(
        list(default) if isinstance(default, tuple) else default,
        *([flag_of(option.name)] if option.kind is bool else []),
        **{"help": option.help, **more},
        **_value_settings(option.form, option.values),
    )


def command(
    app: typer.Typer, verb: str = "", **options: Any
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Add a function, which may return an exit code, to an app as a command.

    A parameter whose type is a dataclass becomes one option for each field that has a help text;
    ``RecipeOptions`` becomes the options of ``Recipe``, ``OperationOptions`` those of operations.

    Args:
        app: the app.
        verb: verb of these operations, such as ``grow``.
        **options: options of typer.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind = Recipe if parameter.annotation is RecipeOptions else parameter.annotation
            flags = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            operation = kind is OperationOptions
            if operation or dataclasses.is_dataclass(kind):
                flags = [*(_operation_parameters(verb) if operation else _field_parameters(kind))]
                groups[name] = parameter.annotation, flags
            parameters += flags

        @functools.wraps(function)
        def run(**values: Any) -> None:
            code = 2
            begin_command()
            try:
                for name, (kind, group) in groups.items():
                    values[name] = kind(
                        **{parameter.name: values.pop(parameter.name) for parameter in group}
                    )
                code = function(**values) or 0
            except KeyboardInterrupt as interrupt:
                print_message(f"interrupted: {interrupt}" if interrupt.args else INTERRUPTED)
                code = 130
            except (SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # some of torch's and Rust's errors are no Exception
                known = isinstance(error, InputError | MemoryError | OSError)
                if os.environ.get("GROWKIT_DEBUG") or not known:
                    print_message(traceback.format_exc())
                print_message(f"error: {_describe(error)}")
            raise typer.Exit(code)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        name = function.__name__.removesuffix("_command")
        app.command(**{"name": name, **options})(run)
        return run

    return decorate


def _field_parameters(kind: type) -> Iterator[inspect.Parameter]:
    """One option for every field of a class that has a help text."""
    hints = get_type_hints(kind)
    for name, setting in options_of(kind).items():
        if setting.help:
            hint = list[float] if hints[name] == tuple[float, ...] else hints[name]
            yield _parameter(name, field_option(kind, name), hint)


def _operation_parameters(verb: str) -> Iterator[inspect.Parameter]:
    """One option for every option of a verb's operations.

    If several operations have an option, it gets the longest of their help texts; if only one has
    it, the help names the operation.
    """
    every: dict[str, dict[str, Option]] = {}
    for operation in operations(verb).values():
        for setting in operation.options:
            every.setdefault(setting.name, {})[operation.name] = setting
    for name, by_operation in every.items():
        longest = max(by_operation.values(), key=lambda variant: len(variant.help))
        of = "" if len(by_operation) > 1 else f" (for {next(iter(by_operation))})"
        shown = _shown(
            dataclasses.replace(longest, form="|".join(longest.values) or longest.form),
            help=f"{longest.help[0].upper()}{longest.help[1:]}{of}.",
            rich_help_panel="Sizes: a factor (x2) or a size (2048)"
            if isinstance(longest, SizeOption)
            else "Options of the operation; of several values the first is the default",
        )
        yield _parameter(name, shown, bool | None if longest.kind is bool else str | None)


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


# Errors.


def _describe(error: BaseException) -> str:
    """Describe an error and its remedy."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, MemoryError):
        return "memory ran out; use a machine with more memory, or compare less at once"
    if isinstance(error, OSError):
        named = isinstance(error.filename, str | bytes)
        file = f"{os.fsdecode(error.filename)}: " if named else ""
        return str(InputError(f"{file}{error.strerror or reason(error)}; fix this and try again"))
    return "internal error; please report it with the output above"


# Command lines.


class Commands(TyperGroup):
    """A group of commands."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """See ``click.Command``."""
        with _usage_errors():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """See ``click.Command``."""
        with _usage_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See ``click.Group``."""
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name):
            return super().resolve_command(ctx, args)
        meant = did_you_mean(name, self.list_commands(ctx))
        raise USAGE(f"there is no command {name!r}; {meant}", ctx)


class ListCommand(TyperCommand):
    """A command in which an option with several values takes all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        lists = {
            name for param in self.params if getattr(param, "multiple", 0) for name in param.opts
        }
        spread: list[str] = []
        option, has_value = "", False
        for word in [*args, "-"]:
            if word.startswith("-"):
                if option and not has_value:
                    raise InputError(
                        f"{option} has no value; give at least one "
                        f"('{ctx.command_path} --help' lists everything)"
                    )
                name, sign, _ = word.partition("=")
                option, has_value = (name if name in lists else ""), bool(sign)
            elif option:
                spread += [option] if has_value else []
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread[:-1])


WORDS, HIDDEN = "growkit.words", "growkit.hidden"
"""Keys of what a context knows: the words of its command line, and options that its help omits."""


class OperationCommand(TyperCommand):
    """A command of several operations; its help shows the options of the one that is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        ctx.meta[WORDS] = {word for argument in args for word in argument.split("=")}
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See ``click.Command``."""
        known = operations(ctx.info_name)
        named = [known[name] for name in known if name in ctx.meta[WORDS]]
        every, shown = (
            {option.name for operation in group for option in operation.options}
            for group in (known.values(), named)
        )
        ctx.meta[HIDDEN] = every - shown if named else set()
        super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        """See ``click.Command``."""
        hidden = ctx.meta.get(HIDDEN, ())
        return [param for param in super().get_params(ctx) if param.name not in hidden]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report in one sentence a mistake that typer, or an option before the command, finds."""
    try:
        yield
    except (USAGE, InputError) as error:
        if "NoArgsIsHelp" in type(error).__name__:  # its message is the help
            raise
        known = error if isinstance(error, InputError) else InputError(_describe_usage(error))
        print_message(f"error: {known}")
        raise typer.Exit(2) from None


def _describe_usage(error: Any) -> str:
    """Describe a mistake in a command line, and suggest a correction."""
    name, help_of = getattr(error, "option_name", None), ""
    if error.ctx is not None:
        help_of = f"'{error.ctx.command_path} --help' lists everything"
        if hasattr(error, "possibilities"):
            meant = _other_command(error.ctx, str(name)) or did_you_mean(
                name, *_flags(error.ctx.command), otherwise=help_of, quoted=str
            )
            return f"{error.ctx.command_path} has no option {name}; {meant}"
    if wanted := re.search("valid (int|number|float)", error.message):
        kind = "a whole number" if wanted[1] == "int" else "a number"
        return f"{error.param.opts[-1]} takes {kind}; {help_of}"
    message = " ".join(error.format_message().split()).rstrip(".")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if "; " in message or not help_of else f"{message}; {help_of}"


def _other_command(ctx: Any, name: str) -> str:
    """Suggest other commands that have an option, or the option that takes its name; "" if none."""
    commands = getattr(ctx.parent and ctx.parent.command, "commands", {})
    others = [other for other, command in commands.items() if name in _flags(command)[0]]
    if others:
        return f"growkit {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it"
    choosing = {"grow": "--method", "convert": "--to", "shrink": "--method"}.get(ctx.info_name)
    operation = name.removeprefix("--")
    known = operations(ctx.info_name) if choosing else {}
    return f"did you mean {choosing} {operation}?" if operation in known else ""


def _flags(command: Any) -> tuple[list[str], dict[str, str]]:
    """Every option in a command's help, and the options of sizes by the flags of config keys."""
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    names = [name for param in shown for name in (*param.opts, *param.secondary_opts)]
    known = [name for name in names if name.startswith("--")]
    options = [option for operation in operations("grow").values() for option in operation.options]
    sizes = {flag_of(key): flag_of(name) for key, name in config_key_aliases(options).items()}
    return known, {alias: name for alias, name in sizes.items() if name in known}


# Output.


def print_message(message: str) -> None:
    """Print a message on stderr."""
    typer.echo(plain(message, keep="\n"), err=True)


@contextmanager
def prefix_errors(done: str) -> Iterator[None]:
    """Prefix the message of an error or interrupt in this block with the work done before."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{done}; {error}" if done else str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*filter(None, [done])) from None


def print_result(
    result: Any, as_json: bool, written: object = None, parts: Iterable[Any] | None = None
) -> None:
    """Print a result.

    Args:
        result: the result, of JSON types only.
        as_json: whether to print JSON.
        written: true if files hold the result too, so that a failure to print it for people is a
            warning.
        parts: the parts to show; None for the result's own view.
    """
    if as_json:
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        # Characters that control a terminal are only in strings, where JSON can escape them.
        safe = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        typer.echo("".join(safe))
    else:
        from growkit.report.terminal import PlainConsole, parts_of, show_parts

        # Lines in a file or a pipe are not wrapped at the terminal's width.
        console = PlainConsole(width=None if sys.stdout.isatty() else 200)
        show_parts(console, parts_of(result) if parts is None else parts)
    if written and not as_json and (why := unprinted()):  # nothing replaces JSON on stdout
        print_message(f"warning: {why}")


class _DroppingStream(io.FileIO):
    """A stream that never fails: output that cannot be written is dropped."""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """See ``io.RawIOBase``."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # EPIPE: the reader has enough
                _output_errors.append(str(error.strerror))
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def drop_failed_output() -> None:
    """Replace standard output and error of this process by streams that never fail.

    A closed stream is opened, since the next opened file would get its number, and the output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The new file gets the lowest free number, which is this one. Standard output is opened
            # for reading, so that an attempt to write to it fails and is reported.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    if not os.environ.get("COLUMNS", "1").strip("0"):  # an unknown width
        del os.environ["COLUMNS"]
    for name, number in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # streams of tests have no number
            if stream is None or stream.fileno() == number:
                raw = _DroppingStream(number, "w", closefd=False)
                dropping = io.TextIOWrapper(
                    io.BufferedWriter(cast(Any, raw)),
                    encoding=stream.encoding if stream else "utf-8",
                    errors="backslashreplace",  # a terminal may lack characters such as →
                    line_buffering=number == 2 or raw.isatty(),
                )
                setattr(sys, name, dropping)


def unprinted() -> str:
    """Report, once, why standard output could not be written; empty if all of it was.

    A closed pipe, as after ``head``, is not a failure.
    """
    sys.stdout.flush()
    why = "; ".join(dict.fromkeys(_output_errors))
    _output_errors.clear()
    return why and f"the result cannot be printed ({why})"
