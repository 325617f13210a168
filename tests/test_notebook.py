"""The notebook shows what its cells compute; ``python -m tests.notebook`` writes that."""

import copy
import re
from typing import Any

import pytest
import torch

from tests.notebook import code_of, executed, read
from tests.test_readme import alike

CELLS = 20
VARYING = re.compile(r"^(?:proved|largest difference) .*\n(?: .*\n)*", re.MULTILINE)


def shown(notebook: dict[str, Any]) -> list[str]:
    """What every cell prints, but for times and rounding, and the texts of what it draws."""
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
    printed = [VARYING.sub("", "".join(output["text"])) for output in outputs if "text" in output]
    drawn = ["".join(output["data"]["image/svg+xml"]) for output in outputs if "data" in output]
    return [*printed, *(" ".join(re.findall(r"<text[^>]*>([^<\d][^<]*)<", svg)) for svg in drawn)]


def different(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return not all(alike(a, b) for a, b in zip(shown(one), shown(other), strict=True))


@pytest.mark.sampled(0)
@pytest.mark.usage
def test_the_notebook_shows_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    notebook = read()
    assert len(notebook["cells"]) <= CELLS
    assert len(list(filter(None, shown(notebook)))) == 5
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
