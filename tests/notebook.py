"""Runs a notebook without a kernel: ``python -m tests.notebook`` writes what its cells show.

A cell shows what it prints, and its last line if that is a drawing.
"""

import ast
import contextlib
import copy
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "growing.ipynb"

RESULT = {"output_type": "execute_result"}

Cell = dict[str, Any]


@dataclass
class SVG:
    """``IPython.display.SVG``."""

    data: str


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same notebook with the outputs of this run."""
    made = copy.deepcopy(notebook)
    display = ModuleType("IPython.display")
    display.__dict__["SVG"] = SVG
    modules = {"IPython": ModuleType("IPython"), "IPython.display": display}
    names: dict[str, Any] = {}
    sys.modules.update(modules)  # what the cells import besides stays imported
    try:
        for number, cell in enumerate(code_of(made), 1):
            cell["execution_count"] = number
            cell["outputs"] = [*_outputs(cell, number, names)]
    finally:
        for name in modules:
            del sys.modules[name]
    return made


def code_of(notebook: dict[str, Any]) -> list[Cell]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _outputs(cell: Cell, number: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lines = ast.parse("".join(cell["source"]))
    last = lines.body.pop() if isinstance(lines.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(lines, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    if text := printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
    if isinstance(value, SVG):
        data = {"image/svg+xml": value.data.splitlines(True)}
        yield {"data": data, "execution_count": number, "metadata": {}} | RESULT


def read() -> Any:
    return json.loads(NOTEBOOK.read_text("utf-8"))


if __name__ == "__main__":
    made = json.dumps(executed(read()), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(made + "\n", "utf-8")
