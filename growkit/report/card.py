"""The model card beside the weights, fit to be published: it says what the manifest says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from growkit.base.errors import plain
from growkit.base.units import size
from growkit.modeling import OLDEST_TRANSFORMERS
from growkit.recipe.planner import EAGER_EXPERTS
from growkit.report.markup import figure
from growkit.report.summary import native_name, predictions, text_name
from growkit.results.advice import fault_sentence
from growkit.results.sentences import NOT_TRIED, trainability_sentence

Found = Mapping[str, Any]

MEASURES = (
    ("dtype", "dtype"),
    ("device", "device"),
    ("largest logit difference / logit scale", "relative"),
    ("limit of that", "tolerance"),
    ("KL, nats per token", "kl_nats_per_token"),
    ("top-1 agreement", "top1_agreement"),
)

SNIPPET = """```python
from transformers import {classes}

name = "."  # this folder; ORG/NAME once it is on the Hub
{lines}
```"""


class Markdown(str):
    """Text that is markup already."""


DCP = "torch.distributed.checkpoint"

DCP_SNIPPET = f"""It loads with {DCP}, into a model of the class and sizes in `config.json`:

```python
import {DCP} as dcp

state = model.state_dict()
dcp.load(state, checkpoint_id=".")  # this folder
```"""

WITHOUT_WEIGHTS = """Its weights are not kept here, but the proof of how they are made:
`growkit.load("growkit.json", source="SRC")` makes them of the source while it loads, and refuses
any other source."""


def model_card(manifest: Found, *, tokenizer: bool = False) -> str:
    """A ``README.md`` in the Hub's form.

    Args:
        manifest: what ``growkit.json`` will hold.
        tokenizer: whether one lies beside the weights.
    """
    proof = manifest["verification"]
    parts = [
        _metadata(manifest),
        f"# {_name(manifest)}",
        _told(manifest),
        _table(["", "before", "after"], _at_a_glance(manifest)),
        "## How to use it",
        WITHOUT_WEIGHTS if manifest.get("not_kept") else _use(manifest, tokenizer),
        "## Is anything lost?",
        *(_proof(proof) if proof else ["Not verified: the proof was switched off."]),
        *_continuing(manifest.get("updates")),
        "## How it was made",
        "\n".join(f"- {_code(_step(step))}" for step in manifest["recipe"]["steps"]),
        "`growkit.json` holds the recipe, the versions, the seed, the hashes of the source files "
        "and all measured figures. `growkit run growkit.json --source SRC --output OUT` makes this "
        "model again.",
        "## Citation",
        "\n".join(f"- {paper}" for paper in dict.fromkeys(manifest["papers"])),
        _citation(manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(manifest: Found) -> str:
    """What the Hub reads; texts as JSON, which is YAML."""
    lines = []
    if _in_transformers(manifest.get("loads_with")):
        lines += ["library_name: transformers", "pipeline_tag: text-generation"]
    base = manifest["recipe"].get("base_model")
    if base:
        lines.append(f"base_model: {json.dumps(base)}")
    verbs = [
        f"- {json.dumps(name)}" for step in manifest["recipe"]["steps"] for name in _verb(step)
    ]
    return "\n".join(["---", *lines, "tags:", "- growkit", *dict.fromkeys(verbs), "---"])


def _verb(step: Found) -> Iterator[str]:
    """The name of the method or variant of a step."""
    yield from (str(step[verb]) for verb in ("grow", "convert") if verb in step)


def _name(manifest: Found) -> str:
    return _text(manifest["recipe"]["output"])


def _told(manifest: Found) -> str:
    """In a sentence or two what this is."""
    grown = any("grow" in step for step in manifest["recipe"]["steps"])
    made = f"{'Grown' if grown else 'Converted'} from {_source(manifest)}"
    told = f"{made} with growkit {manifest['growkit']}."
    if manifest.get("lost"):
        return f"{told} What was given up: {_text(manifest['lost'])}."
    proof = manifest["verification"]
    if proof and proof["kept"] and proof["promise"] == "exact":
        told += " It computes what its source computes: nothing that was learned is lost."
    return told


def _source(manifest: Found) -> str:
    """The model that this was made from: its name on the Hub, or that of its folder."""
    recipe = manifest["recipe"]
    base = recipe.get("base_model")
    if base:
        return f"[{base}](https://huggingface.co/{base})"
    return _code(recipe["source"])


def _at_a_glance(manifest: Found) -> Iterator[list[Any]]:
    """What it was made from and how, and what that did to sizes and loss."""
    proof = manifest["verification"] or {}
    yield ["model", Markdown(_source(manifest)), Markdown(_code(manifest["recipe"]["output"]))]
    yield ["how", "–", "; then ".join(_in_words(step) for step in manifest["recipe"]["steps"])]
    yield from _sizes(manifest, proof.get("source_bytes"))
    if proof:
        losses = [figure(proof[f"loss_{of}"], ".4f") for of in ("source", "target")]
        yield [f"loss, nats per token ({predictions(proof)}, {text_name(proof)})", *losses]


def _in_words(step: Found) -> str:
    """A step in a few words, e.g. ``grow: hypercloning, hidden x2``."""
    (verb,) = (verb for verb in ("grow", "convert") if verb in step)
    options = (f"{key} {value}" for key, value in step.items() if key != verb)
    return f"{verb}: {', '.join([str(step[verb]), *options])}"


def _sizes(manifest: Found, before: int | None) -> list[list[Any]]:
    return [
        ["parameters", manifest["source_parameters"], manifest["parameters"]],
        [f"size, {manifest['dtype']}", size(before) if before else None, size(manifest["bytes"])],
    ]


def _in_transformers(loads_with: Any) -> bool:
    return not loads_with or str(loads_with).startswith("transformers")


def _use(manifest: Found, tokenizer: bool) -> str:
    loads_with = manifest.get("loads_with")
    if loads_with == DCP:
        return DCP_SNIPPET
    if not _in_transformers(loads_with):
        return f"It loads with {_text(loads_with)}."
    trusted = ", trust_remote_code=True" if "trust_remote_code" in str(loads_with) else ""
    ragged = any(EAGER_EXPERTS in each for each in manifest["warnings"])
    options = f"{trusted}, {EAGER_EXPERTS}" if ragged else trusted
    lines = [f'model = AutoModelForCausalLM.from_pretrained(name, dtype="auto"{options})']
    classes = ["AutoModelForCausalLM"]
    if tokenizer:
        classes.append("AutoTokenizer")
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained(name{trusted})",
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        ]
    snippet = SNIPPET.format(classes=", ".join(classes), lines="\n".join(lines))
    return f"{snippet}\n\n{_needed(manifest, ragged)}"


def _needed(manifest: Found, ragged: bool) -> str:
    """Which transformers loads it, and with what settings."""
    version = manifest["versions"]["transformers"]
    tried = "was made and proved" if manifest["verification"] else "was made"
    needs = f"It {tried} with transformers {_text(version)}."
    if manifest.get("loads_with"):
        needs += f" The code beside the weights needs transformers {OLDEST_TRANSFORMERS} or later."
    if ragged:
        needs += (
            f" `{EAGER_EXPERTS}` is needed because the rows of its experts are no multiples of 16 "
            "bytes, which the product of all experts at once refuses."
        )
    return needs


def _proof(proof: Found) -> Iterator[str]:
    yield f"Promise: {proof['promise']}. Verdict: {_text(proof['reason'])}."
    columns = [proof["strict_float64"], proof["native"], proof["rounding"]]
    rows = [[label, *(column[key] for column in columns)] for label, key in MEASURES]
    yield _table(["", "strict float64", native_name(proof), "the source's own rounding"], rows)
    yield (
        "The last column is what the dtype does to the source alone, against itself in strict "
        "float64: what is as large there is rounding."
    )
    losses = [
        [name, *(figure(proof[f"loss_{of}{ending}"], ".4f") for of in ("source", "target"))]
        for name, ending in (("in strict float64", ""), (native_name(proof), "_native"))
    ]
    yield (f"Loss in nats per token, over {predictions(proof)} ({_text(text_name(proof))}):")
    yield _table(["", "before", "after"], losses)
    words = {True: "yes", False: "no", None: "no limit"}
    modes = [
        [
            mode["name"],
            "not tried" if mode["note"].startswith(NOT_TRIED) else words[mode["kept"]],
            mode["relative"],
            mode["native"],
            mode["note"].removeprefix(NOT_TRIED),
        ]
        for mode in proof["modes"]
    ]
    yield _table(["inference mode", "kept", "strict float64", native_name(proof), ""], modes)
    caught = "yes" if proof["negative_control_caught"] else "no"
    yield f"Negative control caught: {caught} ({_text(proof['negative_control'])})."
    if proof["fault"]:
        sentence = fault_sentence(proof)
        yield f"{_text(sentence[:1].upper() + sentence[1:])}."
    if proof["trainability"]:
        sentence = trainability_sentence(proof["trainability"])
        yield f"{_text(sentence[:1].upper() + sentence[1:])}."


def _continuing(updates: Found | None) -> Iterator[str]:
    """How to go on training."""
    if not updates:
        return
    yield "## Continuing the training"
    groups, new = updates["groups"], [each for each in updates["groups"] if each["new"]]
    keys = ("lr", "weight_decay", "eps")
    if all(each[key] == 1 for each in groups for key in keys):
        yield "All tensors keep the source's learning rate, weight decay and eps."
    else:
        yield (
            "Multiply the source's settings of AdamW by these numbers "
            "(`growkit.training.param_groups` makes the parameter groups):"
        )
        rows = [[_tensors(each["tensors"]), *(each[key] for key in keys)] for each in groups]
        yield _table(["tensors", "learning rate", "weight decay", "eps"], rows)
    if updates["exact"]:
        still = ", as long as what is new stands still" if new else ""
        yield f"The model then learns exactly what its source would have learned{still}."
    else:
        why = _text("; ".join(updates["why"]))
        yield f"This follows the source's training only approximately: {why}."
    yield (
        f"With one rate for all tensors, {updates['single_rate']:.2g} times that of the source "
        "makes steps of the same length. μP (arXiv 2203.03466) has the same factors for the rate: "
        "one that was best for the source should stay so at this width."
    )


def _tensors(names: Sequence[str]) -> str:
    """Names of tensors, without what leads to a layer."""
    return ", ".join(_code(name.rpartition(".*.")[2]) for name in names)


def _citation(manifest: Found) -> str:
    year = str(manifest.get("created", ""))[:4]
    return f"""```bibtex
@software{{growkit,
  author = {{{{growkit developers}}}},
  title = {{growkit: grow trained language-model checkpoints, and prove that nothing is lost}},
  version = {{{manifest["growkit"]}}},
  year = {{{year}}},
}}
```"""


def _step(step: Found) -> str:
    return ", ".join(f"{key}: {value}" for key, value in step.items())


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [[*heads], ["---"] * len(heads), *([_shown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    text = value if isinstance(value, Markdown) else _text(figure(value))
    return "–" if text == "none" else text.replace("|", "\\|")


def _text(text: Any) -> str:
    """Escape untrusted text."""
    return plain(str(text)).replace("&", "&amp;").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{plain(text).replace('`', chr(39))}`"
