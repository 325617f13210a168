"""The notebook shows what its cells compute; ``python -m tests.notebook`` writes that."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from tests.notebook import code_of, executed, read
from tests.test_readme import alike

CELLS = 20
ROW = re.compile(r"^(?:<span[^>]*>)?(\w[\w ]*?)(?:  |: )", re.MULTILINE)


def shown(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """What every cell prints, and the names of the rows and lines of what it draws."""
    found = []
    for cell in code_of(notebook):
        for output in cell["outputs"]:
            for kind, lines in {"text": output.get("text", []), **output.get("data", {})}.items():
                text = "".join(lines)
                found.append((kind, text if kind == "text" else " ".join(named(text))))
    return found


def named(drawing: str) -> list[str]:
    return ROW.findall(drawing) or re.findall(r"<text[^>]*>([^<\d][^<]*)<", drawing)


def different(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(shown(one), shown(other), strict=True)
    return any(kind != as_well or not alike(a, b) for (kind, a), (as_well, b) in pairs)


@pytest.mark.usage
def test_the_notebook_shows_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notebook = read()
    assert len(notebook["cells"]) <= CELLS
    kinds = [kind for kind, text in shown(notebook) if text]
    assert sorted(kinds) == ["image/svg+xml", "text", "text", "text", "text/html"]
    assert not different(notebook, executed(notebook)), "run python -m tests.notebook"
    for word in ("not preserved", "1.1942", "771,456", "new capacity", "param_groups<"):
        assert different(notebook, replaced(notebook, word)), word


def replaced(notebook: dict[str, Any], word: str) -> dict[str, Any]:
    """With another word, or a number that is twice as large, in what it shows."""
    other = copy.deepcopy(notebook)
    for cell in code_of(other):
        for output in cell["outputs"]:
            for lines in [output.get("text", []), *output.get("data", {}).values()]:
                lines[:] = [line.replace(word, "2" + word[1:]) for line in lines]
    return other


def test_a_cell_that_fails_is_noticed() -> None:
    cell = {"cell_type": "code", "source": ["growkit.grow()"], "outputs": []}
    with pytest.raises(NameError):
        executed({"cells": [cell]})
