"""The catalogue of ``growkit families`` in ``docs/reference/families.md``, put to the proof.

``python -m tests.catalogue`` writes it into the file; ``tests.test_catalogue`` does what it says to
random models.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit.base.names import NOTHING
from growkit.cli.catalogue import TIED, catalogue, example, table
from growkit.extras.inspection.results.inspection_result import Abilities, Answer
from growkit.model.checkpoint.format import formats
from growkit.model.families.family import family_of
from tests.families import CONFIGS
from tests.models import relative_error, save_random, seeded

FILE = Path(growkit.__file__).parents[1] / "docs" / "reference" / "families.md"
FORMATS = {one.name for one in formats()}
SCALE = "query_pre_attn_scalar"
"""A setting that GGUF holds only if it is the width of heads."""
BEGIN, END = "<!-- growkit families -->\n", "<!-- end -->\n"


def as_markdown(rows: Sequence[Abilities]) -> str:
    """The generated part of the page: what each operation can do, with the types it does it to."""
    (_, _, *names), *lines = table(rows)
    shown = ["| operation | what it can do | `model_type` |", "| --- | --- | --- |"]
    for column, name in enumerate(names, 2):
        kinds: dict[str, list[str]] = {}
        for line in lines:
            kinds.setdefault(line[column], []).append(line[1])
        kinds.pop("–", None)
        for what, types in kinds.items():
            others = [line[1] for line in lines if line[1] not in types]
            listed = ", ".join(types)
            if len(others) < 2 < len(types):
                listed = " but ".join(["every type", *others])
            shown.append(f"| {name} | {what} | {listed} |")
    return BEGIN + "\n".join(shown) + "\n" + END


def random_model(
    kind: str, seed: int, folder: Path, only: Mapping[str, str] = NOTHING
) -> tuple[Path, bool]:
    """A random model with the sizes that the catalogue asks about; whether it is tied.

    Its switches are those of the class, as the catalogue has them, but for what an answer says of
    the config (``only``); its other numbers are random.
    """
    config = CONFIGS[kind](seeded(seed))
    config = {k: v for k, v in config.items() if k == TIED or not isinstance(v, bool | str | list)}
    for only_with_switches in ("word_embed_proj_dim", "num_ln_in_parallel_attn"):
        config.pop(only_with_switches, None)
    family = family_of({"model_type": kind}, kind)
    sizes = example(family, model_type=kind).config
    config = {k: v for k, v in config.items() if k not in family.axes or k in sizes}
    config |= {k: v for k, v in sizes.items() if k not in (TIED, "model_type")}
    if hasattr(CONFIG_MAPPING[kind](), SCALE):
        config[SCALE] = config["head_dim"]
    config |= {key: json.loads(value) for key, value in only.items()}
    source = save_random(folder, CONFIG_MAPPING[kind](**config), seed, torch.float32)
    return source, config[TIED]


@dataclass(frozen=True)
class Outcome:
    """What was promised of the model that was made, and how far off its logits are.

    Attributes:
        promise: None where the growth or conversion was refused.
        error: of whole transformers models in strict float64; None where none loads the outcome.
    """

    promise: str | None
    error: float | None = None


def outcome(verb: str, answer: Answer, source: Path, out: Path) -> Outcome:
    """What happens when somebody does what an answer is about."""
    options: dict[str, Any] = {"verify": False, **answer["options"]}
    try:
        if verb == "grow":
            made = growkit.grow(source, out, method=answer["operation"], **options)
        else:
            # Wide enough for products of two weights: a head norm goes into what reads it.
            dtype = "bfloat16" if answer["operation"] in FORMATS else "float64"
            made = growkit.convert(source, out, answer["operation"], dtype=dtype, **options)
    except growkit.InputError:
        return Outcome(None)
    return Outcome(made["promise"], None if made["loads_with"] else relative_error(source, out))


LIMITS = {"exact": (0.0, 1e-12), "bounded": (1e-12, 0.1), "different": (1e-12, 100.0)}
"""Of the error, by promise: what is bounded is not exact by accident."""


def keeps(promise: str | None, found: Outcome) -> bool:
    """Whether what the catalogue says has come true."""
    if promise is None or promise != found.promise or found.error is None:
        return promise == found.promise
    least, most = LIMITS[promise]
    return least <= found.error < most


if __name__ == "__main__":
    before, _, rest = FILE.read_text("utf-8").partition(BEGIN)
    FILE.write_text(before + as_markdown(catalogue()) + rest.partition(END)[2], encoding="utf-8")
