"""The committed tables of decoders say what becomes of a type now."""

from typing import Any

import pytest

from benchmarks.decoders import FILE, faults, line_of, row_of, table

TABLE = table(FILE.read_text("utf-8"))


@pytest.mark.sampled(1, "bloom")  # which takes the least time
@pytest.mark.parametrize("kind", sorted(TABLE))
def test_the_table_says_what_becomes_of_a_type(kind: str) -> None:
    line = line_of(kind)
    assert faults(line) == []
    assert row_of(line) == TABLE[kind]


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"promise": "exact", "error": 1e-11, "kept": True}, "exact, but off by 1.0e-11"),
        ({"promise": "exact", "error": 0.0, "kept": False, "reason": "why"}, "why"),
        ({"promise": "exact", "error": 0.0, "kept": True, "fault": False}, "not noticed"),
        ({"crash": "KeyError: 'x'"}, "KeyError"),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, Any], fault: str) -> None:
    (found,) = faults({"type": "llama", "growths": {"hidden": said}})
    assert fault in found
