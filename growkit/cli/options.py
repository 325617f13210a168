"""Options of commands: shared ones, and those of settings, recipes and operations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from growkit.base.errors import InputError
from growkit.base.settings import Settings, option
from growkit.checkpoint.folder import check_name
from growkit.planning.operation import SizeOption, Switch, operations
from growkit.probing.settings import ProbeSettings
from growkit.recipe.recipe import Recipe, shipped_recipes

PATHS = ("SRC", "OUT", "FILE", "PATH", "FOLDER", "RECIPE", "RECIPE…")
"""Forms of values that are paths."""

TYPES = {"str": str, "int": int, "float": float, "bool": bool, "tuple[float, ...]": list[float]}
"""The type of a typer option for each type of field."""


class OperationOptions(dict[str, Any]):
    """The options of a verb's operations."""


class RecipeOptions(dict[str, Any]):
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
        None, "Write the result as one HTML page (.html) or as .json.", "FILE"
    )
    json: bool = option(False, "Print the result as JSON on stdout.")


FIELDS: dict[Any, type] = {
    Settings: Settings,
    ProbeSettings: ProbeSettings,
    RecipeOptions: Recipe,
    Running: Running,
    Destination: Destination,
}
"""Types of parameters that become several options: one for each field of these classes."""


def path(text: str) -> Path:
    """A path as it was given."""
    try:
        check_name(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    return Path(text)


def _shown(form: str, values: Callable[[], Iterable[str]] | None) -> dict[str, Any]:
    """How a value is shown, read and completed by a shell."""

    def completed(begun: str) -> list[str]:
        return [each for each in (values() if values else ()) if each.startswith(begun)]

    parser = path if form in PATHS else None
    completion = completed if values else None
    return {"metavar": form or None, "parser": parser, "autocompletion": completion}


def value(
    default: Any,
    help: str,  # noqa: A002
    form: str = "",
    values: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """An option with a value.

    Args:
        default: without the option; ``...`` if it is required.
        help: one line.
        form: what the value looks like, e.g. ``FILE``.
        values: gives those that a shell offers.
    """
    return typer.Option(default, help=help, **_shown(form, values))


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


def flag_of(name: str) -> str:
    """The flag of an option, e.g. ``--max-kl``."""
    return "--" + name.replace("_", "-")


def of_field(kind: type, name: str) -> Any:
    """The typer option of a dataclass's field."""
    (found,) = (each for each in dataclasses.fields(kind) if each.name == name)
    values, default = found.metadata["values"], found.default
    return typer.Option(
        list(default) if isinstance(default, tuple) else default,
        *([flag_of(name)] if found.type == "bool" else []),
        help=found.metadata["help"],
        **_shown(found.metadata["form"], (lambda: values) if values else None),
    )


def expanded(function: Callable[..., Any], verb: str | None = None) -> Callable[..., Any]:
    """A command whose parameters for several options are replaced by these.

    Args:
        function: a command. A parameter whose type is in ``FIELDS`` becomes an option for each
            field, one of type ``OperationOptions`` all options of the verb's operations.
        verb: of the operations.
    """
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, list[inspect.Parameter]] = {}
    parameters: list[inspect.Parameter] = []
    for name, each in signature.parameters.items():
        if each.annotation is OperationOptions:
            groups[name] = list(_options_of_operations(verb or ""))
        elif each.annotation in FIELDS:
            groups[name] = list(_options_of_fields(FIELDS[each.annotation]))
        parameters += groups.get(name, [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)])

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        for name, group in groups.items():
            values = {each.name: given.pop(each.name) for each in group}
            given[name] = signature.parameters[name].annotation(**values)
        return function(**given)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _options_of_fields(kind: type) -> Iterator[inspect.Parameter]:
    """One option for every field of a class that has a help."""
    for each in dataclasses.fields(kind):
        if "help" in each.metadata:
            plain, _, optional = str(each.type).partition(" | ")
            hint: Any = Path if each.metadata["form"] in PATHS else TYPES[plain]
            yield _parameter(
                each.name, of_field(kind, each.name), hint | None if optional else hint
            )


def _options_of_operations(verb: str) -> Iterator[inspect.Parameter]:
    """One option for every option of a verb's operations, with the longest of several helps.

    The help of an option of a single operation names the operation.
    """
    every = [
        (operation.name, each)
        for operation in operations(verb).values()
        for each in operation.options
    ]
    for name in dict.fromkeys(each.name for _, each in every):
        found = {operation: each for operation, each in every if each.name == name}
        longest = max(found.values(), key=lambda each: len(each.help))
        of = "" if len(found) > 1 else f" (for {next(iter(found))})"
        shown = typer.Option(
            None,
            flag_of(name),
            help=f"{longest.help[0].upper()}{longest.help[1:]}{of}.",
            rich_help_panel="Sizes: a factor (x2) or a size (2048)"
            if isinstance(longest, SizeOption)
            else "Options of the operation; of several values the first is the default",
            **_shown(
                "|".join(longest.values) or longest.form, functools.partial(iter, longest.values)
            ),
        )
        yield _parameter(name, shown, bool | None if isinstance(longest, Switch) else str | None)


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
