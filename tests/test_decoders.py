"""The committed tables of decoders say what becomes of a type now."""

from typing import Any

import pytest

from benchmarks.decoders import FILE, faults, line_of, row_of, table
from tests.files import listed

TABLE = table(FILE.read_text("utf-8"))


@pytest.mark.sampled(1, "bloom")  # which takes the least time
@pytest.mark.parametrize("kind", sorted(TABLE))
def test_the_table_says_what_becomes_of_a_type(kind: str) -> None:
    line = line_of(kind)
    assert faults(line) == []
    assert row_of(line) == TABLE[kind]


@pytest.mark.parametrize(("said", "fault"), listed("decoders", "what is wrong"))
def test_what_is_wrong_is_named(said: dict[str, Any], fault: str) -> None:
    (found,) = faults({"type": "llama", "growths": {"hidden": said}})
    assert fault in found
