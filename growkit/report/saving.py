"""Where a result goes as a file: never into a model, nor in the place of anything but a report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.made import MANIFEST, made_around
from growkit.checkpoint.publishing import write_whole
from growkit.report.page import report_page
from growkit.report.probe_page import probe_page

BEGINNINGS = {".html": '<!DOCTYPE html>\n<html lang="en">', ".json": '{\n  "'}
"""How what growkit writes of a result begins."""

OWN = {
    ".html": (" – growkit</title>",),
    ".json": ('\n  "negative_control_caught": ', '\n  "equal_compute": '),
}
"""What it holds that others do not; of JSON, a proof or a probe."""

MOST_BYTES = 1 << 26
"""Size of an earlier report, at most."""


def check_report(file: Path | None, inputs: Inputs, outputs: Sequence[Path] = ()) -> None:
    """Find out before long work whether a report can be written there.

    Args:
        file: an HTML page or JSON, by its name; None for neither.
        inputs: files that must not be overwritten.
        outputs: folders that the same run makes.

    Raises:
        InputError: it cannot; says what would do.
    """
    if file is None:
        return
    if file.suffix not in BEGINNINGS:
        raise InputError(f"report {file} cannot be written; name it .html or .json")
    if not file.parent.is_dir():
        raise InputError(f"{file.parent} is not a folder; make it before a report goes there")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise InputError(f"no report can be written into {file.parent}; name another folder")
    _check_outside(file, inputs, outputs)
    _check_free(file, inputs)


def _check_outside(path: Path, inputs: Inputs, outputs: Sequence[Path]) -> None:
    real = Path(os.path.realpath(path))
    made = (output for output in outputs if real.is_relative_to(os.path.realpath(output)))
    model = inputs.around(path) or next(made, None) or made_around(path)
    if model is not None:
        raise InputError(
            f"{path} would become part of the model in {model}; write the report elsewhere"
        )


def _check_free(path: Path, inputs: Inputs) -> None:
    """Refuse to replace anything but what growkit wrote of a result before."""
    if not os.path.lexists(path):
        return
    if inputs.inside(path) or not _is_report(path):
        raise InputError(f"{path} is no report that growkit wrote; name another file")


def _is_report(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        text = stream.read()
    own = any(mark in text for mark in OWN[path.suffix])
    return text.startswith(BEGINNINGS[path.suffix]) and own


def save_report(result: Mapping[str, Any], file: str | Path, target: str | Path) -> None:
    """Write what a proof found, when it is over; see ``write_report``.

    Args:
        result: a ``growkit.VerifyResult``.
        file: see there.
        target: the target's folder; where it is gone, the report does without its manifest.

    Raises:
        InputError: see there.
    """
    inputs = Inputs([*filter(None, [result["source"], result["target"], result["text"]]), target])
    write_report(result, Path(target), Path(file), inputs)


def _manifest(target: Path) -> dict[str, Any] | None:
    if not target.is_dir():
        return None
    opened = Folder(target)
    return opened.json(MANIFEST) if opened.has(MANIFEST) else None


def write_report(
    result: Mapping[str, Any], target: Path, file: Path | None, inputs: Inputs
) -> None:
    """Write what was asked for.

    Args:
        result: a ``growkit.VerifyResult``.
        target: the target's folder, for its manifest.
        file: an HTML page or JSON, by its name; None for neither.
        inputs: files that must not be overwritten.

    Raises:
        InputError: it cannot be written any more, or the disk is full.
    """
    if file is not None:
        check_report(file, inputs, [target])
        _write(result, report_page(result, _manifest(target)), file, inputs)


def write_probe(
    result: Mapping[str, Any], file: Path | None, inputs: Inputs, made: Sequence[Path] = ()
) -> None:
    """Write what a probe found.

    Args:
        result: a ``growkit.ProbeResult``.
        file: an HTML page or JSON, by its name; None for neither.
        inputs: files that must not be overwritten.
        made: folders that the probe made.

    Raises:
        InputError: see ``write_report``.
    """
    if file is not None:
        check_report(file, inputs, made)
        _write(result, probe_page(result), file, inputs)


def save_probe(result: Mapping[str, Any], file: str | Path) -> None:
    """Write what a probe found, when it is over; see ``write_probe``."""
    write_probe(result, Path(file), Inputs([result["source"], result["text"]]))


def _write(result: Mapping[str, Any], page: str, file: Path, inputs: Inputs) -> None:
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        _check_free(file, inputs)
        write_whole(file, page if file.suffix == ".html" else text)
    except OSError as error:
        where = error.filename or file
        raise InputError(f"the report cannot be written ({error.strerror}: {where})") from error
