"""Results as files: the report (one HTML page or JSON) and the model card next to the weights.

A report is never written inside a model or over another file. The card repeats the manifest and can
be published.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from growkit.base.errors import InputError, plain, reason
from growkit.base.names import name_of, without_paths
from growkit.base.units import size
from growkit.model.checkpoint.folder import CARD, MAX_YAML, Folder
from growkit.model.checkpoint.inputs import Inputs
from growkit.model.checkpoint.publishing import (
    MANIFEST,
    beside,
    made_around,
    move,
    report_left,
    writing,
)
from growkit.model.checkpoint.writing import flush, sha256
from growkit.model.families.family_parts import EAGER_EXPERTS
from growkit.report import proof_page as proofs
from growkit.report.drawing import escape, style_rules
from growkit.report.engine_page import engine_view
from growkit.report.view import Found, ResultView, extra_views, figure
from growkit.results import Result
from growkit.results.growth_result import GrowResult
from growkit.results.proof_result import findings_of, notes_of

REPORTS = {
    ".html": re.compile('<!DOCTYPE html>\\n<html lang="en">.* – growkit</title>', re.DOTALL),
    ".json": re.compile('{\\n  "(promise|equal_compute|kept)": '),
    ".md": re.compile("## Verification: "),
}
"""Beginnings of reports."""

INHERITED = ("license", "license_name", "license_link", "language", "datasets", "base_model")
"""Keys of a model card that hold for a model made from it as well."""

LONGEST_BEGINNING = 1 << 16
"""Characters."""

IN_TABLES = (
    *("KL", "parameters", "tensors", "loss", "largest difference", "inference modes", "proved"),
)
"""Cells of a glance that a model card shows in its tables."""

_HEAD = re.compile(r"\ufeff?\s*---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)
_PUBLIC = re.compile(r"https?://\S+|\w[\w.+ -]*(/\w[\w.+ -]*)*")
_WHOLE = re.compile(r"(?<![\w/.-])(?:-?[\d.]+e-\d+|--[a-z][\w-]*)(?![\w-])")
_MARKDOWN = re.compile(r"[\\`*~$|]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(|(?<=:)/(?=/)|(?<=www)\.")
_NAMES = re.compile(r"[\w./-]{24,}")
_PARTS = re.compile(r"(?<=\w)[./_](?=\w)")


def check_report(
    file: Path | None, inputs: Inputs, outputs: Sequence[Path] = (), cards: bool = True
) -> None:
    """Check before long work whether a report can be written.

    Args:
        file: an HTML page, a card or JSON, by its name; None for none of these.
        inputs: files that must not be overwritten.
        outputs: folders that the same run makes.
        cards: whether the result has a card.

    Raises:
        InputError: the report cannot be written there.
    """
    if file is None:
        return
    if file.suffix not in REPORTS:
        raise InputError(f"report {file} cannot be written; name it .html, .md or .json")
    if file.suffix == ".md" and not cards:
        raise InputError("a card is of a verification; name the report of a probe .html or .json")
    if not file.parent.is_dir():
        raise InputError(f"{file.parent} is not a folder; make it before a report goes there")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise InputError(f"no report can be written into {file.parent}; name another folder")
    real = Path(os.path.realpath(file))
    containing = (output for output in outputs if real.is_relative_to(os.path.realpath(output)))
    model = inputs.around(file) or next(containing, None) or made_around(file)
    if model is not None:
        raise InputError(
            f"{file} would become part of the model in {model}; write the report elsewhere"
        )
    if os.path.lexists(file) and (inputs.overlap(file) or not _is_report(file)):
        raise InputError(f"{file} is not a report written by growkit; name another file")


def _is_report(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        return bool(REPORTS[path.suffix].match(stream.read(LONGEST_BEGINNING)))


def write_report(
    result: Mapping[str, Any],
    file: Path | None,
    inputs: Inputs,
    outputs: Sequence[Path] = (),
    compared: Sequence[Path] = (),
) -> None:
    """Write the report of a result.

    Args:
        result: a ``growkit.VerifyResult``, a ``growkit.EngineResult`` or a ``growkit.ProbeResult``.
        file: an HTML page, a card or JSON, by its name; None for none of these.
        inputs: files that must not be overwritten.
        outputs: folders of the run; of a proof, the target's, for its manifest.
        compared: folders or files of the source and the target, whose hashes a card has.

    Raises:
        InputError: the report can no longer be written, or the disk is full.
    """
    if file is None:
        return
    check_report(file, inputs, outputs, cards="equal_compute" not in result)
    if file.suffix == ".html":
        text = page(_view(result, outputs))
    elif file.suffix == ".md":
        text = verification_card(result, compared)
    else:
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    try:
        write_whole(file, text)
    except OSError as error:
        where = error.filename or file
        raise InputError(f"the report cannot be written ({error.strerror}: {where})") from error


def _view(result: Mapping[str, Any], outputs: Sequence[Path]) -> ResultView:
    if of_extra := extra_views().get(type(result).__name__):
        return of_extra(result)
    if "promise" not in result:
        return engine_view(result)
    opened = Folder(outputs[0]) if outputs[0].is_dir() else None
    manifest = opened.json(MANIFEST) if opened and opened.has(MANIFEST) else None
    return proofs.proof_view(result, manifest)


def save_report(result: Result, file: str | Path) -> None:
    """Write the report of a growth, a proof or a probe, as ``--report`` does.

    Args:
        result: the result.
        file: one HTML page (.html), a card of a verification (.md), or .json.

    Raises:
        InputError: the report cannot be written there, or there was no proof.
    """
    reported = result.verification if isinstance(result, GrowResult) else result
    outputs = [Path(result[key]) for key in ("output", "target") if key in result]
    if reported is None:
        raise InputError(f"{outputs[0]} was not proved, so there is no report; verify it first")
    inputs = [*filter(None, (reported.get(key) for key in ("source", "target", "text"))), *outputs]
    compared = [Path(reported[key]) for key in ("source", "target") if key in reported]
    write_report(reported, Path(file), Inputs(inputs), outputs, compared)


def page(view: ResultView) -> str:
    """Render a view as one HTML file."""
    rules = style_rules() + Path(__file__).with_name("page.css").read_text("utf-8")
    return _template("page.html", flowing).render(view=view, style=rules)


def flowing(value: Any) -> Markup:
    """Render a value as HTML that breaks only between words and between parts of long names.

    By default, browsers break lines after hyphens, as in ``--max-kl`` and ``1e-14``.
    """
    kept = _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(figure(value)))
    # The text is escaped above, so only our own tags are markup.
    return Markup(_NAMES.sub(lambda name: _PARTS.sub(r"\g<0><wbr>", name[0]), kept))  # noqa: S704


def inherited(source: Folder) -> dict[str, str | list[str]]:
    """Read what the card of a source says of licence, languages, data and origin.

    Paths of a machine, and values that are neither text nor a list of texts, are left out.

    Raises:
        InputError: the card cannot be read.
    """
    if not source.has(CARD):
        return {}
    head = _HEAD.match(source.bytes(CARD).decode("utf-8", "replace").replace("\r\n", "\n"))
    try:
        content = yaml_texts(head[1][:MAX_YAML]) if head else {}
    except ValueError as error:
        raise InputError(
            f"{source.path / CARD} cannot be read ({error}), so its licence, languages, data sets "
            "and base model are not in the new card; correct it"
        ) from None
    metadata = dict[str, str | list[str]]()
    for key in INHERITED if isinstance(content, dict) else ():
        value: Any = content.get(key)
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) and _PUBLIC.fullmatch(text) for text in texts):
            metadata[key] = value
    return metadata


def model_card(
    manifest: Found,
    metadata: Found = MappingProxyType({}),
    *,
    tokenizer: bool = False,
    eager_experts: bool = False,
) -> str:
    """Render the model card, a ``README.md`` in the Hub's form.

    Args:
        manifest: the content of ``growkit.json``.
        metadata: what the source's card says of it; see ``inherited``.
        tokenizer: whether there is a tokenizer next to the weights.
        eager_experts: whether transformers refuses to multiply with all experts at once.
    """
    steps, proof = manifest["recipe"]["steps"], manifest["verification"]
    cells = proofs.glance(proof) if proof else {}
    return _template("card.md", _escaped).render(
        manifest=manifest,
        metadata=metadata,
        methods=list(dict.fromkeys(str(next(iter(step.values()))) for step in steps)),
        how="; then ".join(step.replace(" ", ": ", 1) for step in proofs.steps_of(manifest)),
        steps=[", ".join(f"{key}: {step[key]}" for key in step) for step in steps],
        tokenizer=tokenizer,
        eager=f", {EAGER_EXPERTS}" if eager_experts else "",
        compared_on=proofs.compared_on(proof) if proof else "",
        tables=proofs.tables(proof) if proof else [],
        cells={name: cell for name, cell in cells.items() if name not in IN_TABLES},
    )


def verification_card(result: Found, compared: Sequence[Path]) -> str:
    """Render a verification for a model page: what was compared, limits, and what is unverified.

    Args:
        result: a ``growkit.VerifyResult`` or a ``growkit.EngineResult``.
        compared: folders or files of the source and the target.

    Raises:
        InputError: a file can no longer be read.
    """
    named = [str(result[key]) for key in ("source", "target", "text") if result.get(key)]
    public = without_paths([*named, *map(str, compared)])(result)
    findings = findings_of(public)
    silent = [finding["sentence"] for finding in findings if finding["kept"] is None]
    programs = (public["sections"].get("engine") or {}).get("programs", ())
    hashes = {program["file"]: program["sha256"] for program in programs}
    for model in compared:
        for name, path in _files_of(model).items():
            hashes[f"{name_of(str(model))}/{name}" if model.is_dir() else name] = sha256(path)
    return _template("verification.md", _escaped).render(
        result=public,
        source=name_of(str(result["source"])),
        target=name_of(str(result["target"])) if "target" in result else "",
        reason=public["reason"].removeprefix(f"{public['verdict']}: "),
        command=_command(public, programs),
        findings=findings,
        words=proofs.KEPT,
        unverified=dict.fromkeys([*notes_of(public), *silent]),
        hashes=hashes,
        versions=[f"{name} {version}" for name, version in public["versions"].items()],
    )


def _files_of(model: Path) -> Mapping[str, Path]:
    """All files of a model, by name; empty for what is no longer there."""
    if model.is_dir():
        folder = Folder(model)
        return {name: folder.require(name) for name in folder.names()}
    return {model.name: model} if model.is_file() else {}


def _command(result: Found, programs: Sequence[Found]) -> str:
    """The command that repeats a verification."""
    words: list[object] = [
        name_of(str(result[key])) for key in ("source", "target") if key in result
    ]
    for program in programs:
        words += ["--logits", program["file"]]
    if logits := result["sections"].get("logits"):
        tokens = logits["tokens_by_position"]
        words += ["--text", result["text"]] if result["text"] else []
        words += ["--prompts", tokens[0], "--length", len(tokens), "--seed", result["seed"]]
        words += ["--max-kl", logits["max_kl"]] if logits["max_kl"] is not None else []
    return f"growkit verify {' '.join(quote(str(word)) for word in words)}"


def _escaped(value: Any) -> Markup:
    """Render a value as Markdown text, with all markup escaped."""
    text = plain("–" if value is None else figure(value))
    text = _MARKDOWN.sub(r"\\\g<0>", text)
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;"))  # noqa: S704


def _code(text: str) -> Markup:
    """A text in backticks; empty for none."""
    shown = plain(text).replace("`", "'").replace("|", "\\|")
    return Markup(f"`{shown}`" if shown else "")  # noqa: S704  nothing inside of backticks is markup


def _sentence(text: object) -> str:
    """A sentence with a capital letter and a full stop."""
    return f"{str(text)[:1].upper()}{str(text)[1:].removesuffix('.')}."


_FILTERS: dict[str, Callable[..., object]] = {
    "code": _code,
    "figure": figure,
    "json": lambda text: Markup(json.dumps(text)),  # noqa: S704  which is YAML
    "plain": lambda text: Markup(escape(text)),  # noqa: S704  for attributes and titles
    "sentence": _sentence,
    "size": size,
}


@cache
def _template(name: str, escape: Callable[[Any], Markup]) -> Template:
    """A template of this folder.

    Args:
        name: its file name.
        escape: turns every value that is not yet markup into markup.
    """
    environment = Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(value),
        keep_trailing_newline=True,
        loader=FileSystemLoader(Path(__file__).parent),
        lstrip_blocks=True,
        trim_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment.get_template(name)


def yaml_texts(text: str) -> Any:
    """Parse a YAML text of another program, with every scalar as it is written, such as ``no``.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        return yaml.load(text, yaml.BaseLoader)  # noqa: S506 - it makes only text, lists and dicts
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(reason(error)) from None


def write_whole(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file as a whole, or not at all.

    Args:
        path: path of the file; an existing file is replaced.
        text: contents of the file; names that are not valid Unicode are escaped.
        new: whether the path must be free.

    Raises:
        InputError: the file cannot be written, or exists; the message names it.
    """
    partial = beside(path)
    try:
        with writing(path):
            partial.write_bytes(text.encode("utf-8", "backslashreplace"))
            flush(partial)
            (move if new else os.replace)(partial, path)
            flush(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink()
        report_left(path)
