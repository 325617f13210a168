"""Comparison of everything in a model folder except weights: config, tokenizer and code.

Logits do not cover these: prompts are shorter than the longest window, their tokens are the
source's, and the proof runs growkit's own class instead of the code in a folder. If a manifest
records how the folder was made, they are compared with the files that growkit writes, otherwise
with the source.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from growkit.base import __version__
from growkit.base.errors import InputError
from growkit.base.names import listed
from growkit.base.tensors import FLOAT_BYTES, TORCH_NAMES, Config, main_dtype
from growkit.engine.loader import loading
from growkit.engine.transformers_class import PROVENANCE_KEYS, aliases, parsed, resolved
from growkit.engine.written_config import config_to_write
from growkit.model.checkpoint.folder import (
    GENERATION,
    LICENCES,
    WEIGHTS,
    Folder,
    is_of_tokenizer,
    matches,
)
from growkit.model.checkpoint.format import read_config
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.checkpoint.reading import Checkpoint, RoundedCheckpoint
from growkit.model.families.config_keys import earlier_keys
from growkit.model.families.family import families, known_family, unlisted_family
from growkit.model.families.family_parts import MISSING, value_at
from growkit.planning.companions import companions
from growkit.planning.manifest import changed_since
from growkit.planning.own_class import config_as_loaded
from growkit.planning.plan import Lineage
from growkit.planning.recipe import Recipe
from growkit.proof import config_comparison as configs
from growkit.proof import sidecars
from growkit.proof.pair import Pair
from growkit.results.proof_result import (
    AGAIN,
    ChangedValue,
    FilesSection,
    Finding,
    value_in_words,
    value_sentence,
)

SPEED = "use_cache"
"""A config key that does not change the model's function."""

FREE = frozenset({SPEED, "transformers_version", "_name_or_path"})
"""Config keys whose values may differ from those that growkit wrote."""

RENAMED = frozenset({"torch_dtype"}).union(*(family.former for family in families().values()))
"""Former names of config keys in transformers or a family, which are still read."""


WRITTEN = frozenset({"config.json", "README.md", MANIFEST})
"""Files that growkit writes in addition to weights and code."""

INERT = (*LICENCES, ".gitattributes")
"""Files that no engine reads."""

UNUSED = "the family in the manifest was not used, since growkit has one of its own for this type"

UNCHANGED = "the files next to the weights are as they should be"

TRUSTED: dict[str, dict[str, bytes]] = {}
"""Code of folders that a user trusts, by the name of the model class that came from it."""

MAX_LETTERS = 60
"""Limit for the length of a value in a sentence."""


@dataclass
class FolderDifferences:
    """Differences in the files next to the weights.

    Attributes:
        changed: files and config keys with wrong contents.
        named: notes on differences that do not decide, and on what was not compared.
        unknown: files of the target with which nothing can be compared.
        values: expected and actual values of keys in ``changed``.
        of_source: names in ``changed`` whose expected contents are the source's, not growkit's.
    """

    changed: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    values: list[ChangedValue] = field(default_factory=list)
    of_source: list[str] = field(default_factory=list)

    @property
    def section(self) -> FilesSection:
        """The section on files, with a finding on the first change."""
        finding = Finding(name="files", kept=not self.changed, sentence=UNCHANGED)
        if self.changed:
            name = finding.place = self.changed[0]
            values = next((value for value in self.values if value["name"] == name), None)
            source = name in self.of_source
            expected = "it is in the source" if source else f"growkit {__version__} writes"
            finding.sentence = f"{name} is not what {expected}"
            finding.sentence += f" ({value_sentence(values)})" if values else ""
            finding.advice = f"{_restore(name, values)}; or {AGAIN}"
        return FilesSection(
            findings=[finding],
            notes=self.named,
            changed=self.changed,
            changed_values=self.values,
            unknown_files=self.unknown,
        )


def _restore(name: str, values: ChangedValue | None) -> str:
    """Advice to undo a change outside the weights."""
    if values is None:
        return f"put {name} back as it was"
    actual = value_in_words(values.found)
    if values.expected is None:
        return f"put {name} back as it was (it is {actual})"
    return f"set {name} back to {values.expected} (it is {actual})"


def compare_folders(pair: Pair, layer_settings: Sequence[str]) -> FolderDifferences:
    """Compare everything but weights; ``named`` reports what the verdict does not cover.

    Args:
        pair: source and target.
        layer_settings: settings of the target's layers that changed.
    """
    source, target, lineage, recipe = pair.before, pair.after, pair.lineage, pair.recipe
    loads = loading(source), loading(target)
    if pair.lineage.unknown:
        differences = compare_with_source(source, target)
    else:
        differences = compare_with_plan(replace(lineage, source=source), target, recipe)
    notes = [*target.notes]
    if isinstance(source, RoundedCheckpoint):
        notes.append(f"the target was compared with the source after rounding to {source.dtype}")
    for checkpoint, loaded in zip((source, target), loads, strict=True):
        if is_trusted(checkpoint.opened, loaded.model):
            notes.append(f"the proof ran the code in {checkpoint.folder}, as you trust it")
        elif code := foreign_code(checkpoint.opened):
            growkits = not loaded.own_class or growkits_code(loaded.config)
            notes.append(
                f"the code in {checkpoint.folder} ({listed(code)}), which runs only if it is "
                f"trusted, was not checked: the proof is about {loaded.model} of "
                f"{'growkit' if growkits else 'transformers'}"
            )
        if loaded.unread:
            unread = listed(loaded.unread)
            notes.append(f"{loaded.model} does not read {unread} in {checkpoint.folder}")
    if differences.unknown:
        notes.append(f"other files were not compared: {listed(differences.unknown)}")
    differences.named[:0] = notes
    differences.changed += layer_settings
    differences.of_source += layer_settings if pair.lineage.unknown else []
    if recipe and recipe.family and not unlisted_family(recipe.family):
        differences.named.append(UNUSED)
    return differences


def compare_with_plan(
    lineage: Lineage, target: Checkpoint, recipe: Recipe | None = None
) -> FolderDifferences:
    """Compare everything in a folder with the files that growkit writes.

    Args:
        lineage: how the target was made, from the checkpoint whose sidecars were copied.
        target: the written folder.
        recipe: the recipe; None if it makes only weights.
    """
    source = lineage.source
    assert isinstance(source, Checkpoint)
    wanted = config_to_write(lineage)
    written = target.published or target.config
    code = growkits_code(wanted)
    carries = wanted.get("auto_map") and wanted["auto_map"] == source.config.get("auto_map")
    if not code and carries:
        code = own_code(source.opened)
    elif code and _has_earlier_code(target, wanted):
        # ``compare_folders`` adds a note that this code was not checked.
        code = own_code(target.opened)
        wanted["auto_map"] = target.config["auto_map"]
    family = lineage.target.family
    free = family.size_keys - family.unseen_sizes - configs.SHARED | configs.set_by_steps(lineage)
    by_plan = _changed_by_plan(source, lineage.target.config, free)
    with_dtypes = (_with_dtype(config, target) for config in (wanted, written))
    values = [*_first_changed_key(*with_dtypes), *by_plan]
    changed = [value["name"] for value in values]
    held = own_code(target.opened)
    changed += [name for name, content in code.items() if held.get(name) != content]
    beside = sidecars.changed_sidecars(source.opened, target.opened)
    changed += [name for name in beside if name != GENERATION]
    changed += sidecars.changed_generation(source.opened, target.opened)
    expected = {*WRITTEN, *code, *source.opened.carried(), *_weights_of(target)}
    for companion in companions():
        if recipe is not None and companion.path(recipe):
            inside = target.opened.names(*companion.outputs())
            changed += changed_since(target, inside)
            expected.update(inside)
    runs, unknown = bool(target.config.get("auto_map")), []
    for name in target.opened.names():
        if name not in expected and _is_read(name, runs):
            changed.append(name)
        elif name not in expected and not sidecars.is_compared(name):
            unknown.append(name)
    named = [_ignored_note(key, "its class") for key in _without_effect(wanted, target)]
    named += _rewritten(source, target)
    if written.get(SPEED) not in (None, wanted.get(SPEED)):
        named.append(f"{SPEED} in config.json differs")
    of_plan = [value["name"] for value in by_plan]
    return FolderDifferences([*dict.fromkeys(changed)], named, unknown, values, of_plan)


def compare_with_source(source: Checkpoint, target: Checkpoint) -> FolderDifferences:
    """Compare a folder of unknown origin with its source."""
    differences, loaded = _compare_configs(source, target), loading(target)
    ids, unseen = sidecars.same_ids(source.opened, target.opened)
    differences.named += [f"not compared: {unseen}"] if unseen else _rewritten(source, target)
    if target.quantised:
        note = "programs that compute with the quantised weights themselves round further"
        differences.named.append(note)
    changed = [f"the tokenizer ({ids})"] if ids else []
    if source.opened.has("config.json") and target.opened.has("config.json"):
        changed += sidecars.changed_generation(source.opened, target.opened)
        changed += sidecars.changed_files(source.opened, target.opened)
    code = foreign_code(target.opened)
    coded = [(named_code(model.opened), own_code(model.opened)) for model in (source, target)]
    if code and loaded.own_class and coded[0] != coded[1]:
        changed += code
    changed += _changed_buffers(source, target)
    differences.of_source += changed
    differences.changed = [*dict.fromkeys(differences.changed + changed)]
    known = {*WRITTEN, *code, *target.opened.code(), *_weights_of(target), *sidecars.READ}
    known |= {*differences.changed}
    names = [name for name in target.opened.names() if name not in known]
    differences.unknown = [name for name in names if not _is_of_source(name, source, target)]
    return differences


def _compare_configs(source: Checkpoint, target: Checkpoint) -> FolderDifferences:
    """Compare the config of a folder of unknown origin with that of its source."""
    model, (was, now, wider) = loading(target).model, _loaded_configs(source, target)
    now = _without_old_keys(source, was, now)
    shown = configs.judge(target, is_target=True)
    keys, other_keys = configs.different_settings(was, now, shown)
    other_keys += ["dtype"] if wider else []
    unstated = {
        key: one.folder
        for key in keys
        for one in (source, target)
        if not one.states(key.partition(".")[0])
    }
    keys = [key for key in keys if key not in unstated]
    stale = configs.stale_sizes(was, now, shown)
    others = was.get("model_type") != now.get("model_type")
    not_compared = [key for key in other_keys if others and key not in was]
    named = [f"{key} in config.json differs" for key in other_keys if key not in not_compared]
    for folder in dict.fromkeys(unstated.values()):
        of_it = [key for key in unstated if unstated[key] == folder]
        named.append(f"not compared, as {folder} does not state it: {listed(of_it)}")
    if others:
        note = "of config.json only keys with the same meaning in both classes were compared"
        named.append(note + (f", not {', '.join(not_compared)}" if not_compared else ""))
    values = [_changed_value(key, {**was, **stale}, now) for key in (*keys, *stale)]
    changed = [value["name"] for value in values]
    if _names_other_class(source, target, model):
        changed.append("architectures in config.json")
    wanted = {**loading(source).config, **source.config}
    for key, replaced in _without_effect(wanted, target).items():
        if replaced:
            named.append(_ignored_note(key, model))
        else:  # other software may read it
            changed.append(f"{key} in config.json")
    of_source = [name for name in changed if name.removesuffix(" in config.json") not in stale]
    return FolderDifferences(changed, named, values=values, of_source=of_source)


def _loaded_configs(source: Checkpoint, target: Checkpoint) -> tuple[Config, Config, bool]:
    """The configs as classes load them; and whether only the target's dtype is wider."""
    was, now = (_with_dtype(loading(model).config, model) for model in (source, target))
    stored = now["dtype"] == _dtype(target) and configs.holds(was["dtype"], now["dtype"])
    wider = stored and was["dtype"] != now["dtype"]
    return ({**was, "dtype": now["dtype"]} if wider else was), now, wider


def _names_other_class(source: Checkpoint, target: Checkpoint, model: str) -> bool:
    """Whether other engines look for another class by a target's config than by the source's."""
    classes, before = (model.config.get("architectures") for model in (target, source))
    family = known_family(target.config)
    allowed: list[Any] = [[model], *([[family.architecture]] if family else [])]
    if source.config.get("model_type") == target.config.get("model_type"):
        allowed.append(before)
    return bool((before or classes) and target.states("architectures")) and classes not in allowed


def _with_dtype(config: Config, checkpoint: Checkpoint) -> Config:
    """A config with the dtype in which transformers loads the folder."""
    dtype = config.get("dtype") or config.get("torch_dtype") or _dtype(checkpoint)
    return {**config, "dtype": str(dtype)}


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype in which transformers loads a folder whose config has none: of its first floats."""
    file = checkpoint.files[0]
    inside = [name for name in checkpoint.tensors if checkpoint.where(name) == str(file)]
    names = sorted(inside) if file.suffix == ".safetensors" else inside
    kinds = (checkpoint.tensors[name].dtype for name in names)
    wide = (kind for kind in kinds if FLOAT_BYTES.get(kind, 0) > 1)  # a class has no float8
    return TORCH_NAMES[next(wide, main_dtype(checkpoint.tensors))]


def _is_of_source(name: str, source: Checkpoint, target: Checkpoint) -> bool:
    """Whether no engine reads a file, or the source has the same file."""
    if matches(name, INERT) or (source.opened.has(name) and is_of_tokenizer(name)):
        return True
    with suppress(InputError):  # large files are not compared
        return source.opened.has(name) and sidecars.same_bytes(source.opened, target.opened, name)
    return False


def _ignored_note(key: str, model: str) -> str:
    return f"{key} in config.json differs, without effect in {model}"


def _without_effect(wanted: Config, target: Checkpoint) -> dict[str, bool]:
    """Config keys whose values the class replaces or ignores, and whether it replaces them.

    Args:
        wanted: the expected value of every key.
        target: the target.
    """
    read = resolved(target.config)
    complete = json.loads(json.dumps(read or target.config, default=str))
    if read is not None:  # a class may compute a number of layers, and save it nowhere
        known, missing = parsed(target.config), target.config.keys() - complete.keys()
        complete |= {key: getattr(known, key) for key in missing if hasattr(known, key)}
    complete["torch_dtype"] = complete.get("dtype")
    complete |= {key: complete.get(own) for key, own in aliases(target.config).items()}
    keys = target.config.keys() - (PROVENANCE_KEYS | RENAMED | FREE) | {"torch_dtype"}
    # An earlier place of these is beside them.
    inside = (complete.get("rope_parameters") or {}) | earlier_keys(complete)
    return {
        key: key in complete
        for key in sorted(keys & target.config.keys())
        if target.config[key] not in (None, complete.get(key), wanted.get(key), inside.get(key))
        and not _has_effect(target.config, key)  # else it was compared as the class reads it
    }


def _has_effect(config: Config, key: str) -> bool:
    """Whether a class reads another config without a key, such as an earlier name of another.

    A number may be the default of the class, so that another one counts as well.
    """
    variants = [config, {other: value for other, value in config.items() if other != key}]
    if type(config[key]) in (int, float):
        variants.append({**config, key: 2 * config[key]})
    read = [(resolved(variant) or variant).items() for variant in variants]
    one, *others = ({k: v for k, v in of if k not in {key, *PROVENANCE_KEYS}} for of in read)
    return any(one != other for other in others)


def _rewritten(source: Checkpoint, target: Checkpoint) -> list[str]:
    """A note on files of a tokenizer whose bytes differ."""
    names = sidecars.rewritten(source.opened, target.opened)
    note = f"compared as transformers reads them, not byte by byte: {listed(names)}"
    return [note] if names else []


def _changed_buffers(source: Checkpoint, target: Checkpoint) -> list[str]:
    """Buffers that only one folder stores, and stored buffers whose values differ."""
    loads, loaded = loading(source), loading(target)
    changed = sorted(loads.made_buffers ^ loaded.made_buffers)
    for name in sorted(loads.buffers.keys() & loaded.buffers.keys()):
        one, other = loads.buffers[name], loaded.buffers[name]
        same_shape = source.tensors[one].shape == target.tensors[other].shape
        if same_shape and not source.read(one).equal(target.read(other)):
            changed.append(other)
    return changed


def _weights_of(checkpoint: Checkpoint) -> set[str]:
    """The names of the files with the weights, and of their possible indices."""
    names = {file.name for file in checkpoint.files}
    indices = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    return names | ({*indices} if not names & {"model.safetensors", "pytorch_model.bin"} else set())


def _is_read(name: str, runs: bool) -> bool:
    """Whether an additional file would be read as weights, or run as code."""
    if "/" in name:
        return name.startswith(GENERATE.split("/")[0] + "/")
    return matches(name, WEIGHTS) or (runs and name.endswith(".py"))


def _changed_value(key: str, wanted: Config, actual: Config) -> ChangedValue:
    """A key, possibly nested, with its expected and its actual value."""
    values = [value_at(config, key, MISSING) for config in (wanted, actual)]
    texts = [*map(_shown, values)]
    if texts == [None, None] and all(isinstance(value, list) for value in values):
        pairs = enumerate(zip(*values, strict=False))
        entry, pair = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (0, values))
        texts = [text and f"{text} (entry {entry})" for text in map(_shown, pair)]
    return ChangedValue(name=f"{key} in config.json", expected=texts[0], found=texts[1])


def _shown(value: Any) -> str | None:
    """A value as JSON; None if it is missing, or too long for a sentence."""
    text = "" if value is MISSING else json.dumps(value, ensure_ascii=False)
    return text if 0 < len(text) <= MAX_LETTERS else None


def _first_changed_key(wanted: Config, actual: Config) -> list[ChangedValue]:
    """Find the first key with another value, after both configs are completed with defaults.

    Keys that the class derives from other keys are in neither file, and come last.
    """
    written = (wanted.keys() | actual.keys()) - FREE
    first, second = resolved(wanted), resolved(actual)
    if first is None or second is None:
        first, second = wanted, actual
    # The class ignores the code that a config names, and keys such as a second rope_theta.
    ignored = (actual.keys() | wanted.keys()) - first.keys() - second.keys() - RENAMED
    ignored -= aliases(actual).keys()
    first |= {key: wanted[key] for key in ignored if wanted.get(key) is not None}
    second |= {key: actual[key] for key in ignored if actual.get(key) is not None}
    missing: Any = object()
    free = FREE | configs.restated(second, second.keys() - first.keys())
    keys = sorted((first.keys() | second.keys()) - free, key=lambda key: (key not in written, key))
    changed = (k for k in keys if first.get(k, missing) != second.get(k, missing))
    return [_changed_value(key, first, second) for key in islice(changed, 1)]


def _without_old_keys(source: Checkpoint, was: Config, now: Config) -> Config:
    """Drop what the source has as well, but its class reads only in place of keys of the target."""
    return {k: v for k, v in now.items() if k in was or v is None or v != source.config.get(k)}


def _changed_by_plan(source: Checkpoint, planned: Config, free: set[str]) -> list[ChangedValue]:
    """Keys, but for free ones, whose values in the plan itself differ from those in the source.

    The size keys of a described family are checked against its class when it plans.
    """
    was, now = (
        resolved(config_as_loaded(config, str(source.folder)))
        for config in (source.config, planned)
    )
    if was is None or now is None:
        return []
    now = _without_old_keys(source, was, now)
    was, now = {**was, "dtype": None}, {**now, "dtype": None}
    keys, _ = configs.different_settings(was, now, configs.judge(source))
    return [_changed_value(key, was, now) for key in keys if key not in free]


GENERATE = "custom_generate/generate.py"


def named_code(folder: Folder) -> dict[str, Any]:
    """Files that make transformers run code: ``{file: its auto_map}``, and ``GENERATE``."""
    files: dict[str, Any] = {GENERATE: True} if folder.has(GENERATE) else {}
    for name in folder.names("*config.json"):
        with suppress(InputError):  # its reader reports the error
            if "/" not in name and (auto_map := folder.json(name).get("auto_map")):
                files[name] = auto_map
    return files


def foreign_code(folder: Folder) -> list[str]:
    """Names of files that refer to code other than growkit's, and of the files with that code."""
    named, config = named_code(folder), read_config(folder)
    family, own = known_family(config), growkits_code(config)
    growkits = {"config.json": dict(family.auto_map)} if family and family.auto_map else {}
    code = own_code(folder)
    if not named or (own and named == growkits and code == own):
        return []
    text = json.dumps(named)
    named_first = sorted(code, key=lambda name: name.removesuffix(".py") not in text)
    # Code that growkit does not write comes first, and within it the code that is referred to.
    return [*named, *sorted(named_first, key=lambda name: code[name] == own.get(name))]


def is_trusted(opened: Folder, model: str) -> bool:
    """Whether a model class came from the same code as a folder has."""
    return model in TRUSTED and TRUSTED[model] == own_code(opened)


def own_code(folder: Folder) -> dict[str, bytes]:
    """The code in a folder, by file name."""
    return {name: folder.bytes(name) for name in folder.code()}


def growkits_code(config: Config) -> dict[str, bytes]:
    """The code that growkit writes with a model, by file name; empty for most families."""
    family = known_family(config)
    return dict(family.code()) if family else {}


def _has_earlier_code(target: Checkpoint, wanted: Config) -> bool:
    """Whether a folder has the code of another version of growkit, unchanged by its manifest."""
    if not target.opened.has(MANIFEST):
        return False
    names, classes = target.opened.code(), target.config.get("auto_map")
    recorded = target.opened.json(MANIFEST).get("files")
    return (
        isinstance(recorded, dict)
        and names == sorted(name for name in recorded if name.endswith(".py"))
        and not changed_since(target, [*names, "config.json"])
        and isinstance(classes, dict)
        and {"AutoConfig", "AutoModelForCausalLM"} <= classes.keys()
        and all(
            _same_class(name, wanted["auto_map"].get(key), names) for key, name in classes.items()
        )
    )


def _same_class(before: object, now: object, files: Collection[str]) -> bool:
    """Whether an ``auto_map`` names a class that may have been in another file of the folder."""
    module, _, name = str(before).rpartition(".")
    return f"{module}.py" in files and name == str(now).rpartition(".")[2]
