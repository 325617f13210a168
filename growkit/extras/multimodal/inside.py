"""The language model inside a multimodal checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from growkit.base.tensors import Config
from growkit.model.checkpoint.reading import Checkpoint, View

PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Prefixes of a language model's tensors: in multimodal files, and in files of its own."""


class Inside(View):
    """The language model inside a multimodal checkpoint.

    Args:
        checkpoint: the multimodal checkpoint.
        config: config of the language model.

    Attributes:
        others: the tensors of the other parts of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        super().__init__(checkpoint)
        self.stands_alone = False
        self.part_of = self.config["model_type"]
        self.names = tensors_inside(self.tensors)
        self.others = self.tensors.keys() - self.names.values()
        names = (name.removeprefix("model.") for name in sorted(self.others))
        parts = Counter(name.partition(".")[0] for name in names)
        self.left_out = {
            part: f"{count} tensors of the {self.part_of} model around the language model"
            for part, count in parts.items()
        }
        self.config = config
        published = self.published or {}
        outer = {key: published[key] for key in ("dtype", "torch_dtype") if key in published}
        inner = {"model_type": config["model_type"], **published.get("text_config", {})}
        self.published = inner | outer
        self.tensors = {name: self.tensors[stored] for name, stored in self.names.items()}
        rest = f"; {' and '.join(self.left_out)} are left out" if self.left_out else ""
        self.note = (
            f"{self.folder} holds a {self.part_of} model; only its language model "
            f"({config['model_type']}) is used{rest}"
        )


def tensors_inside(names: Iterable[str]) -> dict[str, str]:
    """Map names of a language model's tensors to their names in multimodal files.

    The mapping is empty if there is only a head.
    """
    stored_names = {
        own + name.removeprefix(prefix): name
        for name in names
        for prefix, own in PREFIXES.items()
        if name.startswith(prefix)
    }
    return stored_names if any(not name.startswith("lm_head.") for name in stored_names) else {}
