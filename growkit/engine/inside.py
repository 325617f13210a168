"""The language model inside a multimodal model, as if it were all.

transformers resolves its config from that of the whole; its tensors are those that the files of the
whole keep under its prefix. Towers and projectors are left out.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from growkit.base.errors import foreign
from growkit.base.lazy import Tensor
from growkit.base.tensors import Config
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.oracle import parsed, quiet
from growkit.families.family import families

NAMES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Prefixes of its tensors in files of the whole, and in files of the language model alone."""


class Inside(Checkpoint):
    """The language model inside of a checkpoint.

    Args:
        checkpoint: the whole.
        config: of the language model.

    Attributes:
        dropped: the other parts of the whole, and why they are left out.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        self.__dict__.update(checkpoint.__dict__)  # the same folder, opened once
        self._checkpoint, self.stands_alone = checkpoint, False
        self._whole = self.config["model_type"]
        self._stored = tensors_inside(self.tensors)
        rest = self.tensors.keys() - self._stored.values()
        parts = Counter(name.removeprefix("model.").partition(".")[0] for name in sorted(rest))
        self.dropped = {
            part: f"{count} tensors of the {self._whole} model around the language model"
            for part, count in parts.items()
        }
        self.config = config
        self.tensors = {name: self.tensors[stored] for name, stored in self._stored.items()}

    def where(self, name: str | None = None) -> str:
        """See ``Checkpoint``."""
        return self._checkpoint.where(name and self._stored.get(name, name))

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Checkpoint``."""
        return self._checkpoint.read(self._stored[name], *where)

    def cuts(self, name: str) -> int:
        """See ``Checkpoint``."""
        return self._checkpoint.cuts(self._stored[name])

    @property
    def note(self) -> str:
        """A sentence on the parts that are left out."""
        rest = f"; {' and '.join(self.dropped)} are left out" if self.dropped else ""
        return (
            f"{self.folder} holds a {self._whole} model; only its language model "
            f"({self.config['model_type']}) is used{rest}"
        )


def alone(checkpoint: Checkpoint) -> Checkpoint:
    """The language model inside of a checkpoint that sees or hears as well; any other as it is.

    Raises:
        InputError: transformers does not take the config of the whole.
    """
    known = {kind for family in families().values() for kind in family.model_types}
    inner, kind = checkpoint.config.get("text_config"), checkpoint.config.get("model_type")
    if not isinstance(inner, dict) or kind in known or not tensors_inside(checkpoint.tensors):
        return checkpoint
    config = _config_inside(checkpoint)
    if not config or config.get("model_type") not in known:
        return checkpoint
    return Inside(checkpoint, config)


def tensors_inside(names: Iterable[str]) -> dict[str, str]:
    """From names of a language model's tensors to their names in files of the whole.

    Empty if there is only a head.
    """
    found = {
        own + name.removeprefix(prefix): name
        for name in names
        for prefix, own in NAMES.items()
        if name.startswith(prefix)
    }
    return found if any(not name.startswith("lm_head.") for name in found) else {}


def _config_inside(checkpoint: Checkpoint) -> Config | None:
    """The config that the language model has alone; None where transformers has no class."""
    from transformers import CONFIG_MAPPING

    whole, folder = checkpoint.config, checkpoint.folder
    if whole.get("model_type") not in CONFIG_MAPPING:
        return None
    with quiet(), foreign(f"transformers cannot load {folder}", "correct its config.json"):
        resolved: Any = parsed(whole, str(folder / "config.json"))
        inner = resolved.get_text_config(decoder=True)
        config: Config = json.loads(inner.to_json_string(use_diff=True))
    # What ties them is the class of the whole.
    config["tie_word_embeddings"] = bool(resolved.tie_word_embeddings)
    dtype = whole.get("dtype", whole.get("torch_dtype"))
    return {**config, "dtype": dtype} if dtype else config
