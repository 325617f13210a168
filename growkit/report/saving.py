"""Where a result goes as a file: never into a model, nor in the place of anything but a report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from re import DOTALL, findall
from typing import Any

from growkit.checkpoint.folder import Folder
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.made import MANIFEST, made_around
from growkit.checkpoint.whole import write_whole
from growkit.errors import InputError
from growkit.report import drawing
from growkit.report.page import report_page
from growkit.report.probe_page import probe_page

BEGINNINGS = {
    ".html": '<!DOCTYPE html>\n<html lang="en">',
    ".json": '{\n  "',
    ".svg": '<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" ',
}
"""How what growkit writes of a result begins."""

OWN = {
    ".html": (" – growkit</title>",),
    ".json": ('\n  "negative_control_caught": ', '\n  "equal_compute": '),
    ".svg": ("</svg>\n",),
}
"""What it holds that others do not; of JSON, a proof or a probe."""

MOST_BYTES = 1 << 26
"""Size of an earlier report, at most."""


def check_report(
    file: Path | None, figures: Path | None, inputs: Inputs, outputs: Sequence[Path] = ()
) -> None:
    """Find out before long work whether a report can be written there.

    Args:
        file: an HTML page or JSON, by its name; None for neither.
        figures: folder for the charts; None for none.
        inputs: what is read.
        outputs: folders that the same run makes.

    Raises:
        InputError: it cannot; says what would do.
    """
    if file is not None and file.suffix not in BEGINNINGS.keys() - {".svg"}:
        raise InputError(f"report {file} cannot be written; name it .html or .json")
    if file and figures and os.path.realpath(file) == os.path.realpath(figures):
        raise InputError(f"{file} cannot be both the report and the folder of the figures")
    for path, what in ((file, "a report goes"), (figures, "figures go")):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path.parent} is not a folder; make it before {what} there")
        if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(f"{path.parent} may not be written into, where {what}; name another")
    if figures is not None and os.path.lexists(figures) and not figures.is_dir():
        raise InputError(f"{figures} is a file; name a folder for the figures")
    for path, what in ((file, "report"), (figures, "figures")):
        if path is not None:
            _check_outside(path, what, inputs, outputs)
    charts = sorted(figures.glob("[0-9][0-9].svg")) if figures and figures.is_dir() else []
    for path in ([file] if file else []) + charts:
        _check_free(path, inputs)


def _check_outside(path: Path, what: str, inputs: Inputs, outputs: Sequence[Path]) -> None:
    real = Path(os.path.realpath(path))
    made = (output for output in outputs if real.is_relative_to(os.path.realpath(output)))
    model = inputs.around(path) or next(made, None) or made_around(path)
    if model is not None:
        raise InputError(
            f"{path} would become part of the model in {model}; write the {what} elsewhere"
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


def save_report(
    result: Mapping[str, Any],
    file: str | Path,
    figures: str | Path | None,
    target: str | Path,
) -> None:
    """Write what a proof found, when it is over; see ``write_report``.

    Args:
        result: a ``growkit.VerifyResult``.
        file: see there.
        figures: see there.
        target: the target's folder; where it is gone, the report does without its manifest.

    Raises:
        InputError: see there.
    """
    inputs = Inputs([*filter(None, [result["source"], result["target"], result["text"]]), target])
    charts = Path(figures) if figures is not None else None
    write_report(result, Path(target), Path(file), charts, inputs)


def _manifest(target: Path) -> dict[str, Any] | None:
    if not target.is_dir():
        return None
    opened = Folder(target)
    return opened.json(MANIFEST) if opened.has(MANIFEST) else None


def write_report(
    result: Mapping[str, Any],
    target: Path,
    file: Path | None,
    figures: Path | None,
    inputs: Inputs,
) -> None:
    """Write what was asked for.

    Args:
        result: a ``growkit.VerifyResult``.
        target: the target's folder, for its manifest.
        file: an HTML page or JSON, by its name; None for neither.
        figures: folder for the charts as SVG files; None for none.
        inputs: what was read.

    Raises:
        InputError: it cannot be written any more, or the disk is full.
    """
    if file is None and figures is None:
        return
    check_report(file, figures, inputs, [target])
    _write(result, report_page(result, _manifest(target)), file, figures, inputs)


def write_probe(
    result: Mapping[str, Any], file: Path | None, inputs: Inputs, made: Sequence[Path] = ()
) -> None:
    """Write what a probe found.

    Args:
        result: a ``growkit.ProbeResult``.
        file: an HTML page or JSON, by its name; None for neither.
        inputs: what was read.
        made: folders that the probe made.

    Raises:
        InputError: see ``write_report``.
    """
    if file is not None:
        check_report(file, None, inputs, made)
        _write(result, probe_page(result), file, None, inputs)


def save_probe(result: Mapping[str, Any], file: str | Path) -> None:
    """Write what a probe found, when it is over; see ``write_probe``."""
    write_probe(result, Path(file), Inputs([result["source"], result["text"]]))


def _write(
    result: Mapping[str, Any], page: str, file: Path | None, figures: Path | None, inputs: Inputs
) -> None:
    files = {}
    if file is not None:
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        files[file] = page if file.suffix == ".html" else text
    if figures is not None:
        for number, chart in enumerate(findall(r"<svg.*?</svg>", page, DOTALL), 1):
            files[figures / f"{number:02}.svg"] = drawing.standalone(chart)
    try:
        if figures is not None:
            figures.mkdir(exist_ok=True)
        for path, text in files.items():
            _check_free(path, inputs)
            write_whole(path, text)
    except OSError as error:
        where = error.filename or file or figures
        raise InputError(f"the report cannot be written ({error.strerror}: {where})") from error
