"""The model card that lies beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from growkit.results.sentences import fault_sentence, trainability_sentence


def model_card(manifest: Mapping[str, Any]) -> str:
    """A ``README.md`` in the Hub's form, from the manifest (``growkit.json``)."""
    recipe = manifest["recipe"]
    steps = "\n".join(f"- `{json.dumps(step, ensure_ascii=False)}`" for step in recipe["steps"])
    papers = "\n".join(f"- {paper}" for paper in dict.fromkeys(manifest["papers"]))
    return f"""---
library_name: transformers
base_model: {json.dumps(recipe["source"])}
tags:
- growkit
---
# Grown with growkit {manifest["growkit"]}

{manifest["source_parameters"]:,} parameters became {manifest["parameters"]:,}
(in {manifest["dtype"]}).

{steps}

## Is anything lost?

{_proof(manifest["verification"])}
## How it was made

{papers}

`growkit.json` holds the recipe, the versions, the seed, the hashes of the source files and all
measured figures.
"""


def _proof(verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return "Not verified: the proof was switched off.\n"
    lines = [
        f"Promise: {verification['promise']}. Verdict: {verification['reason']}.",
        "",
        "| | strict float64 | as it runs |",
        "| --- | --- | --- |",
    ]
    strict, native = verification["strict_float64"], verification["native"]
    for key, label in (
        ("dtype", "dtype"),
        ("device", "device"),
        ("relative", "largest logit difference / logit scale"),
        ("kl_nats_per_token", "KL, nats per token"),
        ("top1_agreement", "top-1 agreement"),
    ):
        lines.append(f"| {label} | {strict[key]} | {native[key]} |")
    lines += [
        "",
        f"Loss in nats per token, over {verification['predictions']} predictions: "
        f"{verification['loss_source']} before, {verification['loss_target']} after. "
        f"Negative control caught: {'yes' if verification['negative_control_caught'] else 'no'}.",
        "",
    ]
    lines += ["| asked with | kept | strict float64 | as it runs |", "| --- | --- | --- | --- |"]
    words = {True: "yes", False: "no", None: "no limit, or not tried"}
    for mode in verification["modes"]:
        kept = words[mode["kept"]]
        lines.append(f"| {mode['name']} | {kept} | {mode['relative']} | {mode['native']} |")
    lines.append("")
    if verification["fault"]:
        lines += [f"{fault_sentence(verification['fault'])}.", ""]
    if verification["trainability"]:
        lines += [f"{trainability_sentence(verification['trainability'])}.", ""]
    return "\n".join(lines)
