"""Options of commands: shared ones, and those of settings, recipes and operations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from growkit.base.errors import InputError
from growkit.base.settings import Settings, option
from growkit.checkpoint.folder import check_name
from growkit.cli.output import say
from growkit.planning.operation import SizeOption, Switch
from growkit.probing.settings import ProbeSettings
from growkit.recipe.files import shipped_recipes
from growkit.recipe.recipe import Recipe, operations

PATHS = ("SRC", "OUT", "FILE", "PATH", "FOLDER", "RECIPE", "RECIPE…")
"""Forms of values that are paths."""

TYPES = {"str": str, "int": int, "float": float, "bool": bool, "tuple[float, ...]": list[float]}
"""The type of a typer option for each type of field."""


class Given(dict[str, str]):
    """The options of operations that were given, by name."""


class Writing(dict[str, Any]):
    """The fields of a recipe that are options."""


@dataclasses.dataclass(frozen=True)
class Running:
    """How a recipe runs."""

    overwrite: bool = option(False, "Replace an OUT that growkit wrote.")
    proof_only: bool = option(
        False, "Keep the proof without the weights, for growkit.load to make them of SRC again."
    )
    dry_run: bool = option(False, "Show the plan; write nothing.")


@dataclasses.dataclass(frozen=True)
class Destination:
    """Where a result goes."""

    report: Path | None = option(
        None, "Write the proof as one HTML page (.html) or as .json.", "FILE"
    )
    json: bool = option(False, "Print the result as JSON on stdout.")


GROUPS: dict[Any, type] = {
    Settings: Settings,
    ProbeSettings: ProbeSettings,
    Writing: Recipe,
    Running: Running,
    Destination: Destination,
}
"""Types of parameters that become several options: one for each field of these classes."""


def path(text: str) -> Path:
    """A path as it was given; one that cannot be a path ends the command."""
    try:
        check_name(text)
    except InputError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    return Path(text)


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completion for a value: the names that begin like it."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _shown(form: str, values: Callable[[], Iterable[str]] | None) -> dict[str, Any]:
    return {
        "metavar": form or None,
        "parser": path if form in PATHS else None,
        "autocompletion": one_of(values) if values else None,
    }


def value(
    default: Any,
    help: str,  # noqa: A002
    form: str = "",
    values: Callable[[], Iterable[str]] | None = None,
    name: str | None = None,
) -> Any:
    """An option with a value.

    Args:
        default: without the option; ``...`` if it is required.
        help: one line.
        form: what the value looks like, e.g. ``FILE``.
        values: gives those that a shell offers.
        name: of the option, unless it is the parameter's.
    """
    return typer.Option(default, *filter(None, [name]), help=help, **_shown(form, values))


def flag(name: str, help: str) -> Any:  # noqa: A002
    """An option without a value."""
    return typer.Option(False, name, help=help)


def argument(
    form: str,
    help: str,  # noqa: A002
    values: Callable[[], Iterable[str]] | None = None,
    default: Any = ...,
) -> Any:
    """An argument; see ``value``."""
    return typer.Argument(
        default, help=help, show_default=default is not None, **_shown(form, values)
    )


SOURCE = argument("SRC", "Model folder: config.json and weights; or hf://ORG/NAME@REVISION.")
OUTPUT = argument("OUT", "Folder to make.")
RECIPE = argument(
    "RECIPE",
    "Recipe (YAML), growkit.json of a model, or a name of `growkit recipes list`.",
    shipped_recipes,
)
FAMILY = value(None, "YAML that describes SRC's family, if growkit does not know it.", "FILE")
JSON = flag("--json", "Print the result as JSON on stdout.")
NO_VERIFY = typer.Option(
    True, " /--no-verify", help="Publish OUT without the proof.", show_default=False
)


def of_field(kind: type, name: str, **more: Any) -> Any:
    """The typer option of a field.

    Args:
        kind: the class that has the field.
        name: of the field.
        **more: ``default`` or ``help`` for a command where they differ.
    """
    found = next(each for each in dataclasses.fields(kind) if each.name == name)
    described: dict[str, Any] = {"default": found.default, **found.metadata, **more}
    flags = [_written(name)] if found.type == "bool" else []
    values = described["values"]
    return typer.Option(
        list(described["default"]) if str(found.type).startswith("tuple") else described["default"],
        *flags,
        help=described["help"],
        **_shown(described["form"], (lambda: values) if values else None),
    )


def expanded(function: Callable[..., Any], verb: str | None = None) -> Callable[..., Any]:
    """A command whose parameters for several options are replaced by these.

    Args:
        function: a command. A parameter whose type is in ``GROUPS`` becomes an option for each
            field, one of type ``Given`` all options of the verb's operations.
        verb: of the operations.
    """
    signature = inspect.signature(function, eval_str=True)
    hints = {name: each.annotation for name, each in signature.parameters.items()}
    groups = {name: list(_options(kind, verb)) for name, kind in hints.items() if _is_group(kind)}

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        for name, group in groups.items():
            values = {each.name: given.pop(each.name) for each in group}
            given[name] = _collect(hints[name], values)
        return function(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kept = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += groups.get(name, [kept])
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _is_group(kind: Any) -> bool:
    return kind is Given or kind in GROUPS


def _collect(kind: Any, values: Mapping[str, Any]) -> Any:
    """A parameter's value, from those of its options."""
    if kind is Given:
        return Given({name: value for name, value in values.items() if value is not None})
    if kind is Destination:
        return Destination(**values)
    return kind(**{k: str(v) if isinstance(v, Path) else v for k, v in values.items()})


def _options(kind: Any, verb: str | None) -> Iterator[inspect.Parameter]:
    """The options of a parameter of this type."""
    if kind is Given:
        assert verb is not None
        yield from _options_of_operations(verb)
        return
    for each in dataclasses.fields(GROUPS[kind]):
        if "help" in each.metadata:
            declared = str(each.type)
            hint: Any = Path if each.metadata["form"] in PATHS else TYPES[_plain(declared)]
            hint = hint | None if declared.endswith("None") else hint
            yield _parameter(each.name, of_field(GROUPS[kind], each.name), hint)


def _plain(declared: str) -> str:
    return declared.removesuffix(" | None")


def _options_of_operations(verb: str) -> Iterator[inspect.Parameter]:
    """One option for every option of a verb's operations, with the longest of several helps.

    An option of a single operation names that.
    """
    every = [operation for operation in operations(verb).values() if operation.options]
    for name in dict.fromkeys(each.name for operation in every for each in operation.options):
        found = {
            operation.name: each
            for operation in every
            for each in operation.options
            if each.name == name
        }
        longest = max(found.values(), key=lambda each: len(each.help))
        of = "" if len(found) > 1 else f" (for {next(iter(found))})"
        shown = typer.Option(
            None,
            _written(name),
            metavar="|".join(longest.values) or longest.form or None,
            help=f"{longest.help[0].upper()}{longest.help[1:]}{of}.",
            autocompletion=one_of(functools.partial(iter, longest.values)),
            rich_help_panel="Sizes: a factor (x2) or a size (2048)"
            if isinstance(longest, SizeOption)
            else "Options of the operation; of several values the first is the default",
        )
        yield _parameter(name, shown, bool | None if isinstance(longest, Switch) else str | None)


def _written(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
