"""A recipe: source, steps, output and what is proved, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.base.paths import name_of
from growkit.base.settings import Settings, check_seed
from growkit.checkpoint.elsewhere import HUB_NAME
from growkit.checkpoint.folder import check_name
from growkit.planning.operation import Operation, Value, complete
from growkit.recipe.operations import having, operation_of


@dataclass(frozen=True, init=False)
class Step:
    """One operation.

    Attributes:
        name: of the operation.
        options: a value for some of its options; those left out have defaults.
    """

    verb: ClassVar[str]
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __init__(
        self, name: str, options: Mapping[str, Value] | None = None, **more: Value
    ) -> None:
        """Make a step; options may also be given as keywords.

        Raises:
            InputError: there is no such operation, option or value; says which there are.
        """
        vars(self).update(name=name, options={**(options or {}), **more})
        complete(self.operation, self.options, having)

    @property
    def operation(self) -> Operation:
        """What is done."""
        return operation_of(self.verb, self.name)

    @property
    def paper(self) -> str:
        """Name and source of the operation."""
        return f"{self.name}: {self.operation.paper}"

    def as_dict(self) -> dict[str, Any]:
        """The step as it would stand in YAML."""
        return {self.verb: self.name, **self.options}


class GrowStep(Step):
    """One growth, e.g. ``GrowStep("hypercloning", hidden="x2", symmetry="keep")``."""

    verb = "grow"


class ConvertStep(Step):
    """One conversion, e.g. ``ConvertStep("dint", gamma="gated")``."""

    verb = "convert"


STEPS: dict[str, type[Step]] = {step.verb: step for step in (GrowStep, ConvertStep)}


DEFAULT_SHARD_SIZE = "5GB"

FORMATS = ("safetensors", "dcp")
"""Of the files with the weights; the first unless another is asked for."""

MOST_STEPS = 100


@dataclass(frozen=True)
class Recipe:
    """Everything that ``growkit run`` needs.

    Attributes:
        source: model folder, or the name of a model on the Hub.
        steps: in order; they run as one pass over the files.
        output: folder to make.
        verify: what the proof compares; None for no proof.
        seed: of the random splits.
        dtype: torch name of the dtype of the output; None for the source's.
        shard_size: upper limit of one output file, e.g. ``5GB``.
        base_model: what the model card calls the source, ``ORG/NAME`` on the Hub; None for nothing.
        family: describes the source's family (``growkit.families.described``); None for one that
            growkit knows.
        optimizer: the state of the source's optimizer, a file or folder; None for none.
        format: of the files with the weights: ``safetensors``, or ``dcp`` for those of
            torch.distributed.checkpoint.
    """

    source: str
    steps: tuple[Step, ...]
    output: str
    verify: Settings | None = field(default_factory=Settings)
    seed: int = 0
    dtype: str | None = None
    shard_size: str = DEFAULT_SHARD_SIZE
    base_model: str | None = None
    family: Mapping[str, Any] | None = None
    optimizer: str | None = None
    format: str = FORMATS[0]

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, what in (("source", "a folder"), ("output", "a folder"), ("optimizer", "a file")):
            path = getattr(self, name)
            if path == "" or (path is None and name != "optimizer"):
                raise InputError(f"the recipe's {name} is empty; name {what}")
            if path is not None:
                check_name(path)
        if self.base_model is not None:
            _check_base_model(self.base_model)
        if self.format not in FORMATS:
            meant = did_you_mean(self.format, FORMATS)
            raise InputError(f"there is no format {self.format!r} of weights; {meant}")
        if not self.steps:
            raise InputError("the recipe has no steps; it needs at least one")
        if len(self.steps) > MOST_STEPS:
            raise InputError(
                f"the recipe has {len(self.steps):,} steps; at most {MOST_STEPS} can be taken"
            )

    @property
    def texts(self) -> list[str]:
        """The texts that are read on the way."""
        calibrations = [step.options.get("calibration") for step in self.steps]
        proof = self.verify.text if self.verify else None
        return [str(text) for text in (*calibrations, proof) if text is not None]

    def by_names(self) -> Recipe:
        """The recipe as it may be published: folders and files by their names alone."""
        verify = self.verify
        if verify and verify.text is not None:
            verify = replace(verify, text=name_of(verify.text))
        steps = tuple(
            type(step)(step.name, {**step.options, "calibration": name_of(str(text))})
            if (text := step.options.get("calibration")) is not None
            else step
            for step in self.steps
        )
        return replace(
            self,
            source=name_of(self.source),
            output=name_of(self.output),
            optimizer=name_of(self.optimizer) if self.optimizer else None,
            steps=steps,
            verify=verify,
        )

    def as_dict(self) -> dict[str, Any]:
        """The recipe as it would stand in YAML."""
        recipe: dict[str, Any] = {
            "source": self.source,
            "steps": [step.as_dict() for step in self.steps],
            "output": self.output,
            "seed": self.seed,
            "shard_size": self.shard_size,
            "dtype": self.dtype,
            "base_model": self.base_model,
            "family": self.family,
            "optimizer": self.optimizer,
            "format": None if self.format == FORMATS[0] else self.format,
            "verify": False,
        }
        if self.verify:
            recipe["verify"] = {k: v for k, v in vars(self.verify).items() if v is not None}
        return {key: value for key, value in recipe.items() if value is not None}


def _check_base_model(name: str) -> None:
    """Refuse what the Hub would, above all a path of this machine.

    Raises:
        InputError: it is no name of a model on the Hub.
    """
    if len(name) > 96 or not HUB_NAME.fullmatch(name):
        raise InputError(
            f"base_model {name!r} is no name of a model on the Hub; "
            "give ORG/NAME, such as meta-llama/Llama-3.2-1B, or leave it out"
        )
