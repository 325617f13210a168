"""Recipes as data: operations by name, steps, source, output and the settings of the proof.

Growths are the modules of ``growkit.growth``, conversions those of ``growkit.conversions``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean, name_of, nearest
from growkit.base.registry import members
from growkit.base.settings import Settings, check_seed, option
from growkit.base.tensors import TORCH_NAMES
from growkit.checkpoint.folder import check_name
from growkit.checkpoint.model_files import HUB_NAME, STORE, address_in
from growkit.checkpoint.publishing import Inputs
from growkit.planning.operation import (
    PACKAGES,
    Operation,
    Value,
    complete,
    config_key_aliases,
    operations,
)

DEFAULT_METHOD = "hypercloning"
"""The growth method that ``growkit grow`` uses unless another is named."""


def suggest_operation(option: str, known: Collection[str]) -> str:
    """Which operations have an option, as what to choose for it; empty if none has.

    Args:
        option: its name, or the config key of the size that it changes.
        known: the options of the operation that lacks it.
    """
    every = {verb: operations(verb).values() for verb in PACKAGES}
    options = [each for found in every.values() for one in found for each in one.options]
    name = config_key_aliases(options).get(option, option)
    if name in known:
        return ""
    ways = []
    for verb, way in (("grow", "the growth method"), ("convert", "the conversion to")):
        named = [one.name for one in every[verb] if name in (each.name for each in one.options)]
        ways += [f"{way} {' or '.join(named)}"] if named else []
    return f"for {name} choose {' or '.join(ways)}" if ways else ""


def operation_of(verb: str, name: str) -> Operation:
    """The operation of this name.

    Raises:
        InputError: there is none; names the nearest, or lists all.
    """
    known = operations(verb)
    if name in known:
        return known[name]
    for other in PACKAGES:
        if name in operations(other):
            raise InputError(f"{name} is not for {verb}; use growkit {other}")
    kind = "growth method" if verb == "grow" else "conversion to"
    meant = did_you_mean(name, sorted(known))
    if nearest(name, known) is None:
        options = {each.name for one in known.values() for each in one.options}
        meant = suggest_operation(nearest(name, options) or "", ()) or meant
    raise InputError(f"there is no {kind} {name!r}; {meant}")


@dataclass(frozen=True, init=False)
class Step:
    """One operation.

    Attributes:
        name: of the operation.
        options: values of some of its options; the rest have defaults.
    """

    verb: ClassVar[str]
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __init__(
        self, name: str, options: Mapping[str, Value | None] | None = None, **more: Value | None
    ) -> None:
        """Make a step; options may also be given as keywords, and None leaves one out.

        Raises:
            InputError: there is no such operation, option or value; lists those there are.
        """
        given = {
            key: value for key, value in {**(options or {}), **more}.items() if value is not None
        }
        vars(self).update(name=name, options=given)
        complete(self.operation, self.options, suggest_operation)

    @property
    def operation(self) -> Operation:
        """The operation itself."""
        return operation_of(self.verb, self.name)

    def as_dict(self) -> dict[str, Any]:
        """The step as YAML holds it."""
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
"""Formats of the files with the weights; the first is the default."""

MOST_STEPS = 100


@dataclass(frozen=True)
class Recipe:
    """Everything that ``growkit run`` needs.

    Attributes:
        source: model folder, or a model on the Hub (``growkit.sources.hub``). A ``Path`` becomes
            its name, also that of the output or of the optimizer's state.
        steps: in order; they run as one pass over the files.
        output: folder to make.
        verify: what the proof compares; None for no proof.
        seed: of the random splits.
        dtype: torch name of the dtype of the output; None for the source's.
        shard_size: upper limit of one output file, e.g. ``5GB``.
        base_model: name of the source in the model card, ``ORG/NAME`` on the Hub; None for none.
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
    dtype: str | None = option(
        None,
        "Store OUT in this dtype; a narrower one than SRC's rounds SRC once, first.",
        values=TORCH_NAMES.values(),
    )
    shard_size: str = option(
        DEFAULT_SHARD_SIZE, "Largest output file; a larger tensor gets one of its own."
    )
    base_model: str | None = option(
        None, "What the model card calls SRC: its name on the Hub.", "ORG/NAME"
    )
    family: Mapping[str, Any] | None = None
    optimizer: str | None = option(
        None,
        "State of SRC's optimizer (optimizer.pt, a checkpoint folder), to be grown as well.",
        "PATH",
    )
    format: str = option(
        FORMATS[0],
        "Files of weights: safetensors, or dcp for torch.distributed.checkpoint.",
        values=FORMATS,
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("source", "output", "optimizer"):
            path = getattr(self, name)
            if isinstance(path, Path):
                object.__setattr__(self, name, str(path))
            if path == "" or (path is None and name != "optimizer"):
                raise InputError(f"the recipe's {name} is empty; name a file or folder")
            if path is not None:
                check_name(str(path))
        base = self.base_model
        if base is not None and (len(base) > 96 or not HUB_NAME.fullmatch(base)):
            raise InputError(
                f"base_model {base!r} is no name of a model on the Hub; "
                "give ORG/NAME, such as meta-llama/Llama-3.2-1B, or leave it out"
            )
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
        """The texts that the recipe reads."""
        calibrations = [step.options.get("calibration") for step in self.steps]
        proof = self.verify.text if self.verify else None
        return [str(text) for text in (*calibrations, proof) if text is not None]

    @property
    def output_path(self) -> Path:
        """Where the output goes, absolute, so that it is found when OUT itself is moved.

        Raises:
            InputError: it is an address, where nothing can be written.
        """
        output = Path(self.output)
        if STORE.fullmatch(self.output.lower()) and not os.path.lexists(output.parts[0]):
            raise InputError(
                f"{address_in(self.output)} is an address, and models are written to folders on "
                "this machine; name a folder, and upload that"
            )
        if ".." in output.parts:  # which leads elsewhere behind a link
            output = Path(os.path.realpath(output.parent)) / output.name
        return Path(os.path.abspath(output))

    def inputs(self, reads: Sequence[str | Path] = ()) -> Inputs:
        """Everything that the recipe reads.

        Args:
            reads: more files, such as the recipe's own.
        """
        paths: list[str | Path] = [self.source, *self.texts, *reads]
        states: list[Path] = []
        if self.optimizer:
            path = Path(self.optimizer)
            formats: Any = members("growkit.optimizer.formats", "FORMAT").values()
            # Any other folder, which may be the whole system, is refused and not listed.
            (states if any(each.holds(path) for each in formats) else paths).append(path)
        return Inputs(paths, states)

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
        """The recipe as YAML holds it."""
        verify = self.verify and {k: v for k, v in vars(self.verify).items() if v is not None}
        recipe = vars(self) | {
            "steps": [step.as_dict() for step in self.steps],
            "format": None if self.format == FORMATS[0] else self.format,
            "verify": verify or False,
        }
        return {key: value for key, value in recipe.items() if value is not None}
