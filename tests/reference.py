"""Commands and options as ``docs/reference/reference.md`` lists them, from the command line itself.

``python -m tests.reference`` writes them into the file; everything above them is written by hand.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import typer

import growkit
from growkit.cli.commands import app

FILE = Path(growkit.__file__).parents[1] / "docs" / "reference" / "reference.md"
HEADING = "## Options\n"


def commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by its words."""
    group = typer.main.get_command(app)
    return dict(_commands(group, "growkit"))


def _commands(
    group: typer.core.TyperGroup, words: str
) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, each in group.commands.items():
        if isinstance(each, typer.core.TyperGroup):
            yield from _commands(each, f"{words} {name}")
        else:
            yield f"{words} {name}", each


def options() -> str:
    """The generated part of the page; an option that several commands share is described once."""
    known: dict[str, str] = {}
    return HEADING + "".join(_section(words, each, known) for words, each in commands().items())


def _section(words: str, command: typer.core.TyperCommand, known: dict[str, str]) -> str:
    """The section of a command.

    Args:
        words: the command.
        command: the command.
        known: the first command of every row so far; gets those of this command.
    """
    arguments = [each for each in command.params if isinstance(each, typer.core.TyperArgument)]
    named = "".join(
        f" {_value(each)}" if each.required else f" [{_value(each)}]" for each in arguments
    )
    lines = [f"\n### {words}{named}\n", f"{inspect.cleandoc(command.help or '')}"]
    rows, same = [], dict[str, list[str]]()
    for each in command.params:
        if isinstance(each, typer.core.TyperOption) and not each.hidden:
            row = _row(each)
            if known.setdefault(row, words) == words:
                rows.append(row)
            else:
                same.setdefault(known[row], []).append(f"`{_names(each)[0]}`")
    if rows:
        lines += ["\n| option | what it does |", "| --- | --- |", *rows]
    lines += [
        f"\nAs for `{first.removeprefix('growkit ')}`: {', '.join(names)}."
        for first, names in same.items()
    ]
    return "\n".join(lines) + "\n"


def _row(option: typer.core.TyperOption) -> str:
    value = "" if option.is_flag else f" {_value(option)}".replace("|", r"\|")
    usual = option.default not in (None, []) and not option.is_flag and not option.required
    values = option.default if isinstance(option.default, list | tuple) else (option.default,)
    default = f" Default: {', '.join(map(str, values))}." if usual else ""
    needed = " Required." if option.required else ""
    return f"| `{', '.join(_names(option))}{value}` | {option.help}{default}{needed} |"


def _names(option: typer.core.TyperOption) -> list[str]:
    return [name for name in [*option.opts, *option.secondary_opts] if name.strip()]


def _value(parameter: typer.core.TyperOption | typer.core.TyperArgument) -> str:
    return parameter.metavar or (parameter.name or "").upper()


if __name__ == "__main__":
    written = FILE.read_text("utf-8").partition(HEADING)[0] + options()
    FILE.write_text(written, encoding="utf-8")
