"""Recipes: what to do to a checkpoint, as Python objects or as strict YAML.

::

    source: ./small
    steps:
      - grow: hypercloning
        hidden: x2
    output: ./large
    verify: {prompts: 8, length: 128, seed: 0}

A step is a growth (``grow: METHOD``) or a conversion (``convert: VARIANT``). Unknown keys are
errors that name the nearest match. Paths are relative to the current folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from growkit.algebra.shares import LEAST_SNR_DB, Shares
from growkit.checkpoint.folder import Folder, check_name, open_regular, read
from growkit.checkpoint.tensors import Weights
from growkit.checkpoint.widening import Widened
from growkit.conversions.conversion import Converted, Value, complete_options, conversions, convert
from growkit.conversions.layouts import is_differential, layout_names, read_layout
from growkit.errors import InputError, reason
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import family_of
from growkit.growth.copying import as_factors
from growkit.growth.method import Size, method_of
from growkit.planning.plan import Plan, Planned
from growkit.results.proof import PROMISES
from growkit.settings import Settings, check_seed

Symmetry = Literal["break", "keep"]
DEFAULT_SNR_DB = 10.0
MOST_SNR_DB = 300
DEFAULT_SHARD_SIZE = "5GB"

MOST_BYTES = 1 << 17
"""Of a recipe file; larger ones take long to understand."""

MOST_STEPS = 100


@dataclass(frozen=True)
class GrowStep:
    """One growth.

    Attributes:
        method: name of the growth method.
        sizes: factor or size for each of its options; what is left out follows.
        symmetry: ``break`` splits weights at random so that copies part in training, ``keep``
            makes plain copies (HyperCloning as published).
        snr_db: signal-to-noise ratio of the random splits in dB.
    """

    method: str
    sizes: Mapping[str, Size] = field(default_factory=dict)
    symmetry: Symmetry = "break"
    snr_db: float = DEFAULT_SNR_DB

    def __post_init__(self) -> None:
        if self.symmetry not in ("break", "keep"):
            raise InputError(f"symmetry {self.symmetry!r} is not known; choose break or keep")
        if not isinstance(self.snr_db, int | float) or isinstance(self.snr_db, bool):
            raise InputError(f"snr_db {self.snr_db!r} is not a number of decibels")
        if not LEAST_SNR_DB <= self.snr_db <= MOST_SNR_DB:
            raise InputError(
                f"snr_db {self.snr_db} is out of range; exact splits exist from 4.78 dB upwards, "
                f"and beyond {MOST_SNR_DB} dB there is no noise left"
            )
        method_of(self.method)

    @property
    def paper(self) -> str:
        """Name and address of the method."""
        return f"{self.method}: {method_of(self.method).paper}"

    def plans(self, source: Weights, seed: int) -> Converted:
        """The plans of this step, for a checkpoint.

        A model that its own family cannot express any more, because signal and noise heads part,
        say, is grown as a DIFF Transformer.
        """
        shares = Shares(self.snr_db if self.symmetry == "break" else None, seed)
        method = method_of(self.method)
        family = family_of(source.config, source.where())
        try:
            return Converted([method.plan(source, self.sizes, shares)], method.promise)
        except InputError:
            if family is DIFF or not is_differential(family, source.config):
                raise
        read = read_layout(source)
        factors = as_factors(family, source.config, method.options, self.sizes)
        return Converted(
            [read, method.plan(Planned(source, read), factors, shares)], method.promise
        )

    def as_dict(self) -> dict[str, Any]:
        """The step as it would stand in YAML."""
        noise = {"snr_db": self.snr_db} if self.symmetry == "break" else {}
        return {"grow": self.method, **self.sizes, "symmetry": self.symmetry, **noise}


@dataclass(frozen=True)
class ConvertStep:
    """One conversion.

    Attributes:
        target: name of the variant, or of the layout, that the model becomes.
        options: a value for some of the conversion's options; those left out have defaults.
    """

    target: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        complete_options(self.target, self.options)

    @property
    def paper(self) -> str:
        """Name and address of what the model becomes."""
        known = conversions().get(self.target)
        if known:
            return f"{self.target}: {known.paper}"
        return f"{self.target}: the layout of {layout_names()[self.target].name}"

    def plans(self, source: Weights, seed: int) -> Converted:
        """The plans of this step, for a checkpoint."""
        return convert(source, self.target, self.options)

    def as_dict(self) -> dict[str, Any]:
        """The step as it would stand in YAML."""
        return {"convert": self.target, **self.options}


Step = GrowStep | ConvertStep


@dataclass(frozen=True)
class Way:
    """The way from a source to what its recipe makes of it.

    Attributes:
        source: the source in the dtype of the output.
        target: the output as it will be.
        plans: all plans between, in order.
        promise: the weakest promise of all steps.
        lost: what is lost, in one line; empty if nothing is.
        steps: the steps, with what was found out on the way in place of what was asked for.
        kl_by_rank: what ranks cost that were tried on the way, nats per token.
    """

    source: Weights
    target: Weights
    plans: list[Plan]
    promise: str
    lost: str
    steps: tuple[Step, ...]
    kl_by_rank: Mapping[int, float]


@dataclass(frozen=True)
class Recipe:
    """Everything that ``growkit run`` needs.

    Attributes:
        source: model folder.
        steps: in order; they run as one pass over the files.
        output: folder to make.
        verify: what the proof compares; None for no proof.
        seed: of the random splits.
        dtype: torch name of the dtype of the output; None for the source's.
        shard_size: upper limit of one output file, e.g. ``5GB``.
    """

    source: str
    steps: tuple[Step, ...]
    output: str
    verify: Settings | None = field(default_factory=Settings)
    seed: int = 0
    dtype: str | None = None
    shard_size: str = DEFAULT_SHARD_SIZE

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("source", "output"):
            if not getattr(self, name):
                raise InputError(f"the recipe's {name} is empty; name a folder")
            check_name(getattr(self, name))
        if len(self.steps) > MOST_STEPS:
            raise InputError(
                f"the recipe has {len(self.steps):,} steps; at most {MOST_STEPS} can be taken"
            )

    def plan(self, source: Weights) -> Way:
        """Plan all steps, from headers alone (and the few numbers that decide on a promise).

        Raises:
            InputError: a step cannot be taken.
        """
        wide = Widened(source, self.dtype) if self.dtype else source
        grown: Weights = wide
        plans: list[Plan] = []
        promises, lost = [], []
        steps: list[Step] = []
        kl_by_rank: Mapping[int, float] = {}
        for step in self.steps:
            taken = step.plans(grown, self.seed)
            kl_by_rank = taken.kl_by_rank or kl_by_rank
            if taken.settled and isinstance(step, ConvertStep):
                step = replace(step, options=taken.settled)
            steps.append(step)
            for plan in taken.plans:
                plans.append(plan)
                grown = Planned(grown, plan)
            promises.append(taken.promise)
            lost += [taken.lost] if taken.lost else []
        promise = max(promises, key=PROMISES.index)
        return Way(wide, grown, plans, promise, "; ".join(lost), tuple(steps), kl_by_rank)

    @property
    def texts(self) -> list[str]:
        """The texts that are read on the way."""
        calibrations = [
            step.options.get("calibration") for step in self.steps if isinstance(step, ConvertStep)
        ]
        proof = self.verify.text if self.verify else None
        return [str(text) for text in (*calibrations, proof) if text is not None]

    def as_dict(self) -> dict[str, Any]:
        """The recipe as it would stand in YAML."""
        recipe: dict[str, Any] = {
            "source": self.source,
            "steps": [step.as_dict() for step in self.steps],
            "output": self.output,
            "seed": self.seed,
            "shard_size": self.shard_size,
            "dtype": self.dtype,
            "verify": False,
        }
        if self.verify:
            recipe["verify"] = {k: v for k, v in vars(self.verify).items() if v is not None}
        return {key: value for key, value in recipe.items() if value is not None}


def load_recipe(file: Path, source: str | None = None, output: str | None = None) -> Recipe:
    """Read a recipe file.

    Args:
        file: YAML, or the manifest of a model, whose recipe makes it again.
        source: replaces the recipe's source.
        output: replaces the recipe's output.

    Raises:
        InputError: names the key that is unknown, missing or of the wrong kind.
    """
    content = _manifest(file) if file.suffix == ".json" else _yaml(file)
    if not isinstance(content, dict):
        raise InputError(f"recipe {file} must be a mapping with source, steps and output")
    given = {
        key: value for key, value in (("source", source), ("output", output)) if value is not None
    }
    return parse_recipe(content | given, str(file))


def _manifest(file: Path) -> Any:
    """The recipe in a manifest; a recipe of its own, where the JSON is no manifest."""
    content = Folder(file.parent).json(file.name)
    return content.get("recipe") if "growkit" in content else content


def _yaml(file: Path) -> Any:
    """The value of a YAML file."""
    from growkit.strict_yaml import parse_yaml

    shipped = str(file) in shipped_recipes()
    hint = f"; 'growkit recipes copy {file}' makes a copy to run" if shipped else ""
    try:
        with open_regular(file) as stream:
            text = read(stream, MOST_BYTES + 1, file).decode("utf-8")
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {file} cannot be read ({reason(error)}){hint}") from None
    if len(text) > MOST_BYTES:
        raise InputError(f"recipe {file} is larger than {MOST_BYTES >> 10} KiB; give a recipe")
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise InputError(f"recipe {file} is not valid YAML: {reason(error)}") from None


def parse_recipe(content: Mapping[str, Any], where: str) -> Recipe:
    """Turn the contents of a recipe file into a recipe; see ``load_recipe``."""
    _known_keys(content, [f.name for f in fields(Recipe)], where)
    for key in ("source", "steps", "output"):
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a recipe needs source, steps and output")
    steps = content["steps"]
    if not isinstance(steps, list):
        raise InputError(
            f"steps in {where} must be a list, each beginning like '- grow: hypercloning'"
        )
    chosen: dict[str, Any] = {
        "source": _typed(content, "source", str, where),
        "output": _typed(content, "output", str, where),
        "steps": tuple(
            _parse_step(step, f"step {number} of {where}") for number, step in enumerate(steps, 1)
        ),
    }
    for key, kind in (("seed", int), ("dtype", str), ("shard_size", str)):
        if key in content:
            chosen[key] = _typed(content, key, kind, where)
    if "verify" in content:
        chosen["verify"] = _parse_verify(content["verify"], f"verify in {where}")
    return Recipe(**chosen)


def _parse_step(step: Any, where: str) -> Step:
    if not isinstance(step, dict) or ("grow" in step) == ("convert" in step):
        raise InputError(
            f"{where} must be a mapping with either 'grow: METHOD' or 'convert: VARIANT'"
        )
    if "convert" in step:
        target = _typed(step, "convert", str, where)
        known = conversions().get(target)
        names = [choice.name for choice in known.choices] if known else []
        _known_keys(step, ["convert", *names], where)
        kinds = (str, int, float, list)
        options = {name: _typed(step, name, kinds, where) for name in names if name in step}
        return ConvertStep(target, options)
    method = method_of(str(step["grow"]))
    sizes = [option.name for option in method.options]
    _known_keys(step, ["grow", *sizes, "symmetry", "snr_db"], where)
    for name in sizes:
        if name in step:
            _typed(step, name, (str, int), where)
    others = {key: step[key] for key in ("symmetry", "snr_db") if key in step}
    return GrowStep(method.name, {name: step[name] for name in sizes if name in step}, **others)


def _parse_verify(content: Any, where: str) -> Settings | None:
    if content is False:
        return None
    if content is True:
        return Settings()
    if not isinstance(content, dict):
        raise InputError(
            f"{where} must be true, false or a mapping like {{prompts: 8, length: 128}}"
        )
    kinds = {"text": str, "prompts": int, "length": int, "seed": int, "device": str}
    kinds["trainability"] = bool
    _known_keys(content, kinds, where)
    return Settings(**{key: _typed(content, key, kinds[key], where) for key in content})


def _known_keys(content: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in content:
        if key not in known:
            nearest = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
            raise InputError(f"{where} has an unknown key {key!r}; {hint}")


def _typed(content: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    value = content[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = cast("tuple[type, ...]", kind if isinstance(kind, tuple) else (kind,))
        names = {
            str: "text",
            int: "a whole number",
            float: "a number",
            list: "a list",
            bool: "true or false",
        }
        raise InputError(
            f"{key} in {where} is {value!r}; {' or '.join(names[k] for k in kinds)} was expected"
        )
    return value


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with growkit, by name."""
    package = Path(__file__).parent
    # In an installed package they lie inside it, in a checkout beside it.
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: there is none of this name; gives the nearest.
    """
    known = shipped_recipes()
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise InputError(f"there is no recipe {name!r}; {hint}")
    return known[name]
