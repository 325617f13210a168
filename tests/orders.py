"""Random models, written in many ways of cutting up and ordering the work.

Blocks of 2¹⁰ to 2²² elements, 1 to 4 workers, any of which may be slow, sources read once or in
parts: the SHA-256 of the weights must stay the same.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint import writing
from growkit.planning import plan
from tests.slices import Case, any_case, recipe_of

WAYS = 8
BLOCKS, WORKERS, SMALL = range(10, 23), range(1, 5), (0, 1 << 10, 1 << 26)


def digests(case: Case, folder: Path, chance: Random, ways: int) -> list[str]:
    """SHA-256 of what is written in so many ways; nothing if it cannot be had."""
    recipe, found = recipe_of(case, folder), []
    for _ in range(ways):
        settings = (chance.choice(BLOCKS), chance.choice(WORKERS), chance.choice(SMALL))
        try:
            with ExitStack() as stack:
                for module, name, value in (
                    (plan, "AT_A_TIME", 1 << settings[0]),
                    (writing, "WORKERS", settings[1]),
                    (plan, "SMALL", settings[2]),
                    (writing, "_write_tensor", _slow(chance.randrange(1 << 30))),
                ):
                    stack.enter_context(mock.patch.object(module, name, value))
                growkit.run(recipe)
        except InputError:  # a variant that the model is already, a dtype that rounds
            return []
        found.append(
            hashlib.sha256((folder / "out" / "model.safetensors").read_bytes()).hexdigest()
        )
        shutil.rmtree(folder / "out")
    return found


def _slow(seed: int) -> Any:
    """Tensors that are written in any order: each waits for a moment."""
    write, chance = writing._write_tensor, Random(seed)

    def waiting(*arguments: Any) -> None:
        time.sleep(chance.random() / 1000)
        write(*arguments)

    return waiting


def sweep(seed: int, count: int, ways: int = WAYS) -> list[str]:
    """One digest for each model.

    Raises:
        AssertionError: a model was written in two ways that differ.
    """
    found: list[str] = []
    while len(found) < count:
        with tempfile.TemporaryDirectory() as folder:
            made = digests(any_case(seed), Path(folder), Random(seed), ways)
        assert len(set(made)) <= 1, f"seed {seed}: {made}"
        found += made[:1]
        seed += 1
    return found
