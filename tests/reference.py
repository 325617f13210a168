"""Commands and options as ``docs/reference.md`` lists them, taken from the command line itself.

``python -m tests.reference`` writes them into the file; everything above them is written by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import typer

import growkit
from growkit.cli.app import app

FILE = Path(growkit.__file__).parents[1] / "docs" / "reference.md"
HEADING = "## Options\n"


def commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by its words."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return dict(_commands(group, "growkit"))


def _commands(
    group: typer.core.TyperGroup, words: str
) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, each in group.commands.items():
        if isinstance(each, typer.core.TyperGroup):
            yield from _commands(each, f"{words} {name}")
        else:
            assert isinstance(each, typer.core.TyperCommand)
            yield f"{words} {name}", each


def options() -> str:
    """The generated part of the page."""
    return HEADING + "".join(_section(words, each) for words, each in commands().items())


def _section(words: str, command: typer.core.TyperCommand) -> str:
    arguments = [each for each in command.params if isinstance(each, typer.core.TyperArgument)]
    named = "".join(
        f" {_value(each)}" if each.required else f" [{_value(each)}]" for each in arguments
    )
    lines = [f"\n### {words}{named}\n", f"{inspect.cleandoc(command.help or '')}\n"]
    shown = [
        each
        for each in command.params
        if isinstance(each, typer.core.TyperOption) and not each.hidden
    ]
    if shown:
        lines += ["| option | value | what it does |", "| --- | --- | --- |"]
    for each in shown:
        names = ", ".join(
            f"`{name}`" for name in [*each.opts, *each.secondary_opts] if name.strip()
        )
        value = "" if each.is_flag else f"`{_value(each)}`".replace("|", r"\|")
        usual = each.default is not None and not each.is_flag and not each.required
        values = each.default if isinstance(each.default, tuple) else (each.default,)
        default = f" Default: {', '.join(map(str, values))}." if usual else ""
        needed = " Required." if each.required else ""
        lines.append(f"| {names} | {value} | {each.help}{default}{needed} |")
    return "\n".join(lines) + "\n"


def _value(parameter: typer.core.TyperOption | typer.core.TyperArgument) -> str:
    return parameter.metavar or (parameter.name or "").upper()


if __name__ == "__main__":
    written = FILE.read_text("utf-8").partition(HEADING)[0] + options()
    FILE.write_text(written, encoding="utf-8")
