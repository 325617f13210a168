"""The model card next to the weights, ready to be published: it states what the manifest holds."""

from __future__ import annotations

import json
from typing import Any

from markupsafe import Markup

from growkit.base.errors import plain
from growkit.base.units import size
from growkit.families.description import EAGER_EXPERTS
from growkit.modeling import OLDEST_TRANSFORMERS
from growkit.report.proof import glance, losses, mode_table, numbers, predictions, text_name
from growkit.report.view import Found, Grid, figure, render

CONCLUSIONS = ("training", "new capacity", "negative control")
"""Findings of a proof that a card states next to its tables."""


def model_card(manifest: Found, *, tokenizer: bool = False, eager_experts: bool = False) -> str:
    """A ``README.md`` in the Hub's form.

    Args:
        manifest: the content of ``growkit.json``.
        tokenizer: whether there is one next to the weights.
        eager_experts: whether transformers refuses to multiply with all experts at once.
    """
    recipe, proof = manifest["recipe"], manifest["verification"]
    loads_with = manifest.get("loads_with")
    steps, base, updates = recipe["steps"], recipe.get("base_model"), manifest.get("updates")
    methods = [str(step[verb]) for step in steps for verb in ("grow", "convert") if verb in step]
    source = _code(recipe["source"])
    if base:
        source = Markup(f"[{base}](https://huggingface.co/{base})")  # noqa: S704  a checked name
    rows = [
        ["model", source, _code(recipe["output"])],
        ["how", "–", "; then ".join(_in_words(step) for step in steps)],
        ["parameters", manifest["source_parameters"], manifest["parameters"]],
        [
            f"size, {manifest['dtype']}",
            size(proof["source_bytes"]) if proof else "–",
            size(manifest["bytes"]),
        ],
    ]
    if proof:
        name = f"loss, nats per token ({predictions(proof)}, {text_name(proof)})"
        rows.append([name, *(figure(proof[f"loss_{of}"], ".4f") for of in ("source", "target"))])
    groups = updates["groups"] if updates else []
    keys = ("lr", "weight_decay", "eps")
    factors = [[_tensors(each["tensors"]), *(each[key] for key in keys)] for each in groups]
    if all(each[key] == 1 for each in groups for key in keys):
        factors = []
    found = glance(proof) if proof else {}
    filters = {
        "json": lambda text: Markup(json.dumps(text)),  # noqa: S704  which is YAML
        "sentence": lambda text: f"{str(text)[:1].upper()}{str(text)[1:]}.",
    }
    return render(
        "card.md",
        _escaped,
        filters,
        manifest=manifest,
        source=source,
        tags=list(dict.fromkeys(methods)),
        summary=Grid(["", "before", "after"], rows, "hnn"),
        in_transformers=not loads_with or str(loads_with).startswith("transformers"),
        tokenizer=tokenizer,
        trusted=", trust_remote_code=True" if "trust_remote_code" in str(loads_with) else "",
        eager=f", {EAGER_EXPERTS}" if eager_experts else "",
        oldest=OLDEST_TRANSFORMERS,
        sections=[numbers(proof), losses(proof), mode_table(proof)] if proof else [],
        conclusions={key: found[key] for key in CONCLUSIONS if key in found},
        factors=Grid(["tensors", "learning rate", "weight decay", "eps"], factors, "cnnn"),
        new=any(each["new"] for each in groups),
        steps=[_code(", ".join(f"{key}: {step[key]}" for key in step)) for step in steps],
        papers=list(dict.fromkeys(manifest["papers"])),
    )


def _in_words(step: Found) -> str:
    """A step in a few words, e.g. ``grow: hypercloning, hidden x2``."""
    (verb,) = (verb for verb in ("grow", "convert") if verb in step)
    options = (f"{key} {value}" for key, value in step.items() if key != verb)
    return f"{verb}: {', '.join([str(step[verb]), *options])}"


def _tensors(names: Any) -> Markup:
    """Names of tensors, without what leads to a layer."""
    return Markup(", ").join(_code(name.rpartition(".*.")[2]) for name in names)


def _escaped(value: Any) -> Markup:
    """A value as Markdown text, with all markup escaped."""
    text = plain("–" if value is None else figure(value))
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|"))  # noqa: S704


def _code(text: str) -> Markup:
    shown = plain(text).replace("`", "'").replace("|", "\\|")
    return Markup(f"`{shown}`")  # noqa: S704  nothing inside of backticks is markup
