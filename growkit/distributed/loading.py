"""Loading a grown model with transformers, which asks for parts of tensors where it shards them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.checkpoint.model_files import GENERATION
from growkit.checkpoint.tensors import TORCH_NAMES, Config, full, main_dtype
from growkit.distributed.entries import Entries
from growkit.distributed.grown import Grown, entries_of
from growkit.engine.oracle import lacks_class, parsed
from growkit.families.added import temporary_family
from growkit.planning.layouts import read_layout
from growkit.planning.lineage import Lineage
from growkit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when it is indexed, as safetensors' slices are read."""

    entries: Entries
    name: str

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self.entries[self.name].info.shape)

    def get_dtype(self) -> str:
        """Its dtype, a safetensors name."""
        return self.entries[self.name].info.dtype

    def __getitem__(self, index: Any) -> Tensor:
        chosen = index if isinstance(index, tuple) else () if index is ... else (index,)
        return self.entries.part(self.name, full(self.entries[self.name].info.shape, chosen))


def load(
    recipe: Recipe | str | Path,
    *,
    source: str | Path | None = None,
    distributed_config: Any = None,
    **options: Any,
) -> Any:
    """The model that a recipe makes, loaded with transformers without being written.

    What it computes with is, bit for bit, what ``from_pretrained`` would load of the folder that
    ``growkit.run`` writes. Every process reads of the source what its own part is made from.

    Args:
        recipe: see ``growkit.run``. Of a model's manifest the source must be the recorded one, so
            that its proof is a proof of what is loaded; its weights need not be there.
        source: replaces the recipe's source.
        distributed_config: transformers' ``DistributedConfig``, by which the model is spread over
            processes; None for all of it in this one.
        **options: others of ``from_pretrained``, e.g. ``dtype`` or ``device_map``.

    Returns:
        The model.

    Raises:
        InputError: the recipe or the source cannot be used, transformers has no causal language
            model for what is made, or the model has to be written first.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    grown = Grown(recipe, source, together=distributed_config is not None)
    folder = grown.source.where()
    with temporary_family(grown.recipe.family):
        lineage, settings = _as_transformers_has_it(grown)
        config = parsed(settings, f"the config of what {folder} becomes")
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise InputError(
            f"{folder} becomes a model of type {config.model_type}, which transformers has no "
            "causal language model for; write it with growkit.run"
        )
    entries = entries_of(lineage.target)
    options.setdefault("dtype", config.dtype or TORCH_NAMES[main_dtype(lineage.target.tensors)])
    if distributed_config is not None:
        options["distributed_config"] = distributed_config
    content = grown.beside(GENERATION)
    if content is not None:
        options.setdefault("generation_config", GenerationConfig.from_dict(content))
    state = {name: Lazy(entries, name) for name in entries}
    return known[type(config)].from_pretrained(None, config=config, state_dict=state, **options)


def _as_transformers_has_it(grown: Grown) -> tuple[Lineage, Config]:
    """How a model is made under the names that transformers reads, and its config."""
    lineage = grown.lineage
    if not lacks_class(grown.config):
        return lineage, grown.config
    read = read_layout(lineage.target)
    return Lineage(lineage.source, [*lineage.plans, read]), read.config
