"""Recipes: source, steps, output and the settings of the proof, also as strict YAML.

::

    source: ./small
    steps:
      - grow: hypercloning
        hidden: x2
    output: ./large
    verify: {prompts: 8, length: 128, seed: 0}

A step is ``grow: METHOD``, ``convert: VARIANT`` or ``shrink: METHOD``. ``family`` may name a
file that describes the source's family (``growkit.model.families.family_yaml``), or hold its
contents.
Unknown keys are errors that name the nearest match. Paths are relative to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from growkit.base.errors import InputError
from growkit.base.names import NOTHING, did_you_mean
from growkit.base.options import Value, check_number, documented, kind_of, option
from growkit.base.parsing import WORDS, check_kind
from growkit.base.settings import SEEDS, Settings, settings_of
from growkit.base.tensors import TORCH_NAMES
from growkit.model.checkpoint import folder as folders
from growkit.model.checkpoint.format import Format
from growkit.model.checkpoint.inputs import Inputs
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.families.family import described
from growkit.model.families.family_yaml import extended
from growkit.planning.companions import companions
from growkit.planning.operation import Operation, complete, operation_of, operations

DEFAULT_METHOD = "hypercloning"
"""The growth method that ``growkit grow`` uses unless another is named."""

DEFAULT_SHRINKING = "undo"
"""The same of ``growkit shrink``."""


def method_for(options: Mapping[str, Value | None]) -> str:
    """The method of shrinking that has one of these options; the default one if none has."""
    named = {name for name, value in options.items() if value is not None}
    methods = operations("shrink").values()
    fitting = (one.name for one in methods if named & {option.name for option in one.options})
    return next(fitting, DEFAULT_SHRINKING)


@dataclass(frozen=True, init=False)
class Step:
    """One operation with its options.

    Attributes:
        name: name of the operation.
        options: values of options; other options have their defaults.
    """

    verb: ClassVar[str]
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __init__(
        self, name: str, options: Mapping[str, Value | None] | None = None, **more: Value | None
    ) -> None:
        """Make a step; options may also be given as keywords, and None leaves one out.

        Raises:
            InputError: there is no such operation, option or value; the message lists valid ones.
        """
        chosen = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in {**(options or {}), **more}.items()
            if value is not None
        }
        vars(self).update(name=name, options=chosen)
        complete(self.operation, self.options)

    @property
    def operation(self) -> Operation:
        """The operation itself."""
        return operation_of(self.verb, self.name)

    @property
    def files(self) -> list[str]:
        """The names of options whose values are text files."""
        return [option.name for option in self.operation.options if option.form in ("FILE", "TEXT")]

    def as_dict(self) -> dict[str, Any]:
        """Convert the step to plain YAML data."""
        return {self.verb: self.name, **self.options}


class GrowStep(Step):
    """One growth, e.g. ``GrowStep("hypercloning", hidden="x2", symmetry="keep")``."""

    verb = "grow"


class ConvertStep(Step):
    """One conversion, e.g. ``ConvertStep("dint", gamma="gated")``."""

    verb = "convert"


class ShrinkStep(Step):
    """One way to shrink, e.g. ``ShrinkStep("undo")``."""

    verb = "shrink"


STEPS: dict[str, type[Step]] = {step.verb: step for step in (GrowStep, ConvertStep, ShrinkStep)}


DEFAULT_SHARD_SIZE = "5GB"

FORMATS = ("safetensors", "dcp")
"""Formats of the weight files; the first is the default."""

MAX_STEPS = 100


@documented
@dataclass(frozen=True)
class Recipe:
    """The complete description of a run.

    Attributes:
        source: model folder, or a model on the Hub (``growkit.sources``). A ``Path`` is converted
            to a string, as it is in output, optimizer and adapter.
        steps: steps in order; they run in one pass over the files.
        output: folder to create.
        verify: settings of the proof; True for the default settings, None or False for no proof.
        seed: seed of the random splits.
        family: description of the source's family (``growkit.model.families.family_yaml``); None
            for a family that growkit knows.
    """

    source: str
    steps: tuple[Step, ...]
    output: str
    verify: Settings | None = field(default_factory=Settings)
    seed: int = 0
    dtype: str | None = option(
        None,
        "Dtype of OUT's weights; if it is narrower than SRC's, SRC is rounded once, first.",
        values=TORCH_NAMES.values(),
    )
    shard_size: str = option(
        DEFAULT_SHARD_SIZE, "Largest weight file; a larger tensor gets a file of its own."
    )
    base_model: str | None = option(None, "SRC's name on the Hub, for the model card.", "ORG/NAME")
    family: Mapping[str, Any] | None = None
    optimizer: str | None = option(
        None,
        "SRC's optimizer state to grow with it (optimizer.pt, or a checkpoint folder).",
        "PATH",
    )
    format: str = option(
        FORMATS[0],
        "Format of the weights: safetensors, or dcp for torch.distributed.checkpoint.",
        values=FORMATS,
    )
    adapter: str | None = option(
        None, "SRC's adapter (a folder of PEFT) to grow with it, into OUT/adapter.", "PATH"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", settings_of(self.verify))
        check_number("seed", self.seed, SEEDS, whole=True)
        for name in ("source", "output", "optimizer", "adapter"):
            path = getattr(self, name)
            if isinstance(path, Path):
                object.__setattr__(self, name, str(path))
            if path == "" or (path is None and name in REQUIRED):
                raise InputError(f"the recipe's {name} is empty; name a file or folder")
            if path is not None:
                folders.check_name(str(path))
        if isinstance(self.family, Mapping):  # a manifest outlives the family that it extends
            object.__setattr__(self, "family", extended(self.family, "the family"))
        base = self.base_model
        if base is not None and (len(base) > 96 or not folders.HUB_NAME.fullmatch(base)):
            raise InputError(
                f"base_model {base!r} is not a name on the Hub; give ORG/NAME, or leave it out"
            )
        if self.format not in FORMATS:
            meant = did_you_mean(self.format, FORMATS)
            raise InputError(f"there is no format {self.format!r} for weights; {meant}")
        self._check_steps()

    def _check_steps(self) -> None:
        if not self.steps:
            raise InputError("the recipe has no steps; it needs at least one")
        if self.file_format and (len(self.steps) > 1 or self.optimizer or self.adapter):
            raise InputError(
                f"the files of {self.file_format.title} take neither other steps nor an "
                "optimizer's state or an adapter; write the model first, and convert the output"
            )
        if len(self.steps) > MAX_STEPS:
            raise InputError(
                f"the recipe has {len(self.steps):,} steps; at most {MAX_STEPS} are allowed"
            )

    @property
    def file_format(self) -> Format | None:
        """The format of another program to which a step converts; None for ``format``."""
        return next(filter(None, (step.operation.file_format for step in self.steps)), None)

    @property
    def texts(self) -> list[str]:
        """The text files that the recipe reads."""
        of_steps = [step.options.get(name) for step in self.steps for name in step.files]
        proof = self.verify.text if self.verify else None
        return [str(text) for text in (*of_steps, proof) if text is not None]

    @property
    def output_path(self) -> Path:
        """The output path, absolute so that it stays valid when OUT itself is moved.

        Raises:
            InputError: the output is a Hub address, which cannot be written to.
        """
        output = Path(self.output)
        if folders.STORE.fullmatch(self.output.lower()) and not os.path.lexists(output.parts[0]):
            raise InputError(
                f"{folders.address_in(self.output)} is an address; name a folder, and upload that"
            )
        if ".." in output.parts:  # behind a link, ".." is the parent of the link's target
            output = Path(os.path.realpath(output.parent)) / output.name
        return Path(os.path.abspath(output))

    def inputs(self, reads: Sequence[str | Path] = ()) -> Inputs:
        """List the files that the recipe reads.

        Args:
            reads: additional files, such as the recipe itself.

        Raises:
            InputError: the optimizer's state or the adapter does not exist.
        """
        paths: list[str | Path] = [self.source, *self.texts, *reads]
        states: list[Path] = []
        for companion in companions():
            if (path := companion.path(self)) is None:
                continue
            if not path.exists():
                raise InputError(f"{path}, the {companion.what}, does not exist; check its name")
            of_companion = companion.inputs(path)
            paths += of_companion[0]
            states += of_companion[1]
        return Inputs(paths, states)

    def as_dict(self) -> dict[str, Any]:
        """Convert the recipe to plain YAML data."""
        verify = self.verify and {k: v for k, v in vars(self.verify).items() if v is not None}
        recipe = vars(self) | {
            "steps": [step.as_dict() for step in self.steps],
            "format": None if self.format == FORMATS[0] else self.format,
            "verify": verify or False,
        }
        return {key: value for key, value in recipe.items() if value is not None}


REQUIRED = ("source", "steps", "output")

INPUT_KEYS = ("source", "optimizer", "adapter", "calibration", "vocab_of", "text")
"""Keys of paths that a recipe reads, including those in its steps and in ``verify``."""

PATH_KEYS = (*INPUT_KEYS, "output")


def load_description(family: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Read the description of a family if it is a file.

    Raises:
        InputError: the file or the description is invalid; the message names the place.
    """
    if not isinstance(family, str | Path):
        return family
    content = folders.read_yaml(Path(family), "the family")
    described(content, str(family))
    assert isinstance(content, dict)
    return content


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with growkit, by name."""
    package = Path(__file__).parent.parent
    # An installed package contains the recipes; in a checkout they are next to the package.
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """Find the file of a shipped recipe.

    Raises:
        InputError: there is no recipe of this name; the message suggests the nearest.
    """
    known = shipped_recipes()
    if name not in known:
        raise InputError(f"there is no recipe {name!r}; {did_you_mean(name, known, quoted=str)}")
    return known[name]


def recipe_file(name: Path) -> Path:
    """Find the file of a recipe.

    Args:
        name: a file; the folder of a model, for its manifest; or, if there is no such file, the
            name of a recipe that ships with growkit.

    Raises:
        InputError: the name is none of these; the message suggests the nearest.
    """
    if os.path.isdir(name):
        if os.path.lexists(name / MANIFEST):
            return name / MANIFEST
        raise InputError(
            f"{name} holds no {MANIFEST}; give a recipe (YAML) or a folder that growkit wrote"
        )
    known = shipped_recipes()
    if os.path.lexists(name) or len(name.parts) != 1:
        return name
    if str(name) not in known:
        listed = "'growkit recipes list' lists the recipes"
        meant = did_you_mean(name.stem, known, otherwise=listed, quoted=str)
        raise InputError(f"there is no file {name}, nor a recipe of that name in growkit; {meant}")
    return known[str(name)]


def load_recipe(
    file: str | Path,
    source: str | None = None,
    output: str | None = None,
    otherwise: Mapping[str, str] = NOTHING,
) -> Recipe:
    """Read a recipe.

    Args:
        file: a YAML file, the manifest of a model, or any other name that ``recipe_file`` accepts.
        source: replaces the recipe's source.
        output: replaces the recipe's output.
        otherwise: default source or output of a recipe that has none.

    Raises:
        InputError: a key is unknown, missing or of the wrong type; the message names it.
    """
    file = recipe_file(Path(file))
    recorded = False
    if file.suffix == ".json":
        content, recorded = _manifest(file)
    else:
        content = folders.read_yaml(file, "recipe")
    content = with_paths(content, os.path.expanduser)
    if not isinstance(content, dict) or content.keys().isdisjoint(REQUIRED):
        raise InputError(f"recipe {file} must be a mapping with source, steps and output")
    overrides: dict[str, Any] = {"source": source, "output": output}
    if isinstance(content.get("family"), str):
        overrides["family"] = load_description(os.path.expanduser(content["family"]))
    overrides = {key: value for key, value in overrides.items() if value is not None}
    return parse_recipe({**otherwise, **content} | overrides, str(file), recorded=recorded)


def _manifest(file: Path) -> tuple[Any, bool]:
    """Read the recipe in a manifest, or in JSON that is a recipe itself, and which of these it is.

    A manifest has file names without folders. A file that is not in the current folder is looked up
    next to the model. If the text of the proof is in neither, the proof compares random tokens, as
    the model does not depend on it. The output is the model itself.
    """
    recipe: Any = folders.Folder(file.parent).json(file.name)
    if "growkit" not in recipe:
        return recipe, False
    recipe = recipe.get("recipe")
    if not isinstance(recipe, dict):
        return recipe, True
    siblings = os.path.dirname(os.path.abspath(file.parent))

    def find(name: str) -> str:
        path = os.path.join(siblings, name)
        return path if os.path.lexists(path) and not os.path.lexists(name) else name

    recipe = with_paths(recipe, find, INPUT_KEYS)
    verify = recipe.get("verify")
    text = verify.get("text") if isinstance(verify, dict) else None
    if isinstance(text, str) and not os.path.isfile(text):
        recipe["verify"] = {key: value for key, value in verify.items() if key != "text"}
    output = recipe.get("output")
    if isinstance(output, str) and output and not os.path.isabs(output):
        recipe["output"] = str(file.parent)
    return recipe, True


def with_paths(
    content: Any, change: Callable[[str], str], keys: Collection[str] = PATH_KEYS
) -> Any:
    """Replace the paths in a recipe's YAML data.

    Args:
        content: the recipe, or a part of it.
        change: maps a path to its replacement.
        keys: keys of the paths to replace.
    """
    if isinstance(content, list):
        return [with_paths(part, change, keys) for part in content]
    if not isinstance(content, dict):
        return content
    changed = {}
    for key, value in content.items():
        if key in keys and isinstance(value, str) and value:
            changed[key] = change(value)
        else:
            changed[key] = value if key == "family" else with_paths(value, change, keys)
    return changed


def parse_recipe(content: Mapping[str, Any], where: str, *, recorded: bool = False) -> Recipe:
    """Parse the contents of a recipe file; see ``load_recipe``.

    Args:
        content: the contents.
        where: the file, for messages.
        recorded: whether a manifest has the recipe (``Option.unrecorded``).
    """
    check_kind(content, _kinds(Recipe) | {"verify": (bool, _kinds(Settings))}, where)
    for key in REQUIRED:
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a recipe needs source, steps and output")
    check_kind(content["steps"], list, f"steps in {where}")
    steps = tuple(
        _parse_step(step, f"step {number} of {where}", recorded)
        for number, step in enumerate(content["steps"], 1)
    )
    verify = content.get("verify", True)
    proof = Settings(**verify) if isinstance(verify, dict) else settings_of(verify)
    return Recipe(**{**content, "steps": steps, "verify": proof})


def _parse_step(step: Any, where: str, recorded: bool) -> Step:
    verbs = [verb for verb in STEPS if isinstance(step, dict) and verb in step]
    if len(verbs) != 1:
        raise InputError(
            f"{where} must be a mapping with 'grow: METHOD', 'convert: VARIANT' or 'shrink: METHOD'"
        )
    (verb,) = verbs
    check_kind(step[verb], str, f"{verb} in {where}")
    for key in step:
        if step[key] is None:
            raise InputError(f"{key} in {where} is null; give a value, or leave it out")
    try:
        parsed = STEPS[verb](step[verb], {key: step[key] for key in step if key != verb})
        former = {option.name: option.unrecorded for option in parsed.operation.options if recorded}
        return STEPS[verb](parsed.name, former | dict(parsed.options))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _kinds(of: type[Recipe | Settings]) -> dict[str, Any]:
    """The kinds of a dataclass's fields, for ``check_kind``."""
    kinds = {name: kind_of(hint) for name, hint in get_type_hints(of).items()}
    return {name: kind if kind in WORDS else object for name, kind in kinds.items()}
