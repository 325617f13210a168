"""Everything in a model folder except weights: its config, its tokenizer and its code.

Logits do not cover them: prompts are shorter than the longest window, their tokens are the
source's, and the proof runs growkit's own class instead of the code in a folder. So they are
compared with what growkit writes if a manifest records how the folder was made, or else with the
source.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import TORCH_NAMES, Config, main_dtype
from growkit.checkpoint.folder import Folder, is_of_tokenizer, matches
from growkit.checkpoint.publishing import MANIFEST, temporary
from growkit.checkpoint.reading import Checkpoint, RoundedCheckpoint
from growkit.engine.loader import loading
from growkit.engine.oracle import PROVENANCE_KEYS, resolved, resolved_as_loaded
from growkit.engine.user_family import unlisted_family
from growkit.families.family import families, family_of
from growkit.optimizer.state import outputs
from growkit.proof import config as configs
from growkit.proof import sidecars
from growkit.proof.weights import Origin
from growkit.recipe.manifest import changed_since
from growkit.recipe.recipe import Recipe
from growkit.results.proof import ChangedValue, Finding, value_sentence
from growkit.version import __version__

SPEED = "use_cache"
"""A key that changes nothing of what a model computes."""

FREE = frozenset({SPEED, "transformers_version", "_name_or_path"})
"""Keys that may differ from what growkit wrote."""

RENAMED = frozenset({"torch_dtype"}).union(*(each.former for each in families().values()))
"""Keys of earlier versions of transformers, or of a family, which are still read."""


WRITTEN = frozenset({"config.json", "README.md", MANIFEST})
"""Files that growkit writes in addition to weights and code."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.gguf", "consolidated*")
"""Weights that some engine or other would read."""


INERT = ("LICENSE*", "NOTICE*", "USE_POLICY*", ".gitattributes")
"""Files that no engine reads."""

UNUSED = "the family in the manifest was not used, since growkit has one of its own for this type"

LISTED = 6
"""Names in a sentence, at most."""

MOST_LETTERS = 60
"""Length of a value in a sentence."""


@dataclass
class FolderDifferences:
    """Differences next to the weights.

    Attributes:
        changed: files and keys that are not what they should be.
        named: what is not the same, or was not compared, and does not decide; in words.
        unknown: files of the target that nothing is known of.
        values: of keys in ``changed``, what they should be and what they are.
        of_source: those in ``changed`` that should be what they are in the source, not what growkit
            writes.
    """

    changed: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    values: list[ChangedValue] = field(default_factory=list)
    of_source: list[str] = field(default_factory=list)

    @property
    def finding(self) -> Finding:
        """The first change."""
        if not self.changed:
            fine = "the files next to the weights are as they should be"
            return Finding(name="files", kept=True, sentence=fine)
        name = self.changed[0]
        source = name in self.of_source
        expected = "it is in the source" if source else f"growkit {__version__} writes"
        sentence = f"{name} is not what {expected}"
        if values := next((each for each in self.values if each["name"] == name), None):
            sentence += f" ({value_sentence(values)})"
        return Finding(name="files", kept=False, sentence=sentence, place=name)


def compare_folders(source: Checkpoint, target: Checkpoint, origin: Origin) -> FolderDifferences:
    """Compare everything but weights; what the verdict does not cover is in ``named``.

    Args:
        source: a folder.
        target: the other one.
        origin: how the target was made.
    """
    loads = loading(source), loading(target)
    if origin.unknown:
        found = compare_with_source(source, target)
    else:
        found = compare_with_plan(source, target, origin.lineage.plans[-1].config, origin.recipe)
    notes = []
    if isinstance(source, RoundedCheckpoint):
        notes.append(f"the source is held against after it was rounded to {source.dtype}, once")
    for checkpoint, each in zip((source, target), loads, strict=True):
        if code := foreign_code(checkpoint.opened):
            growkits = not each.own_class or growkits_code(each.config)
            notes.append(
                f"the code in {checkpoint.folder} ({listed(code)}), which runs only where it is "
                f"trusted, was not looked at: proved is {each.model} of "
                f"{'growkit' if growkits else 'transformers'}"
            )
        if each.passed_over:
            unread = listed(each.passed_over)
            notes.append(f"{each.model} does not read {unread} in {checkpoint.folder}")
    if found.unknown:
        notes.append(f"other files were not compared: {listed(found.unknown)}")
    found.named[:0] = notes
    if origin.recipe and origin.recipe.family and not unlisted_family(origin.recipe.family):
        found.named.append(UNUSED)
    return found


def compare_with_plan(
    source: Checkpoint, target: Checkpoint, planned: Config, recipe: Recipe | None = None
) -> FolderDifferences:
    """Compare everything in a folder with what growkit writes.

    Args:
        source: the folder that the other files come from.
        target: the folder that was written.
        planned: the config that its recipe plans.
        recipe: how it was made; None where that makes weights alone.
    """
    family = family_of(planned, str(target.folder))
    wanted = family.named(planned)
    code = growkits_code(wanted)
    carries = wanted.get("auto_map") and wanted["auto_map"] == source.config.get("auto_map")
    if not family.write_code and carries:
        code = own_code(source.opened)
    elif code and _has_earlier_code(target, wanted):
        # A note of ``compare_folders`` says that this code was not looked at.
        code = own_code(target.opened)
        wanted["auto_map"] = target.config["auto_map"]
    by_plan = _changed_by_plan(source, planned)
    values = [*_first_changed_key(wanted, target.config), *by_plan]
    changed = [each["name"] for each in values]
    changed += [name for name, content in code.items() if not _holds(target, name, content)]
    changed += sidecars.changed_sidecars(source.opened, target.opened)
    expected = {*WRITTEN, *code, *source.opened.carried(), *_weights_of(target)}
    if recipe is not None and recipe.optimizer is not None:
        states = target.opened.names(*outputs())
        changed += changed_since(target, states)
        expected.update(states)
    runs, unknown = bool(target.config.get("auto_map")), []
    for name in target.opened.names():
        if name not in expected and _is_read(name, runs):
            changed.append(name)
        elif name not in expected and not sidecars.is_compared(name):
            unknown.append(name)
    named = _without_effect(wanted, target, "its class") + _rewritten(source, target)
    if target.config.get(SPEED) not in (None, wanted.get(SPEED)):
        named.append(f"{SPEED} in config.json differs")
    of_plan = [each["name"] for each in by_plan]
    return FolderDifferences([*dict.fromkeys(changed)], named, unknown, values, of_plan)


def compare_with_source(source: Checkpoint, target: Checkpoint) -> FolderDifferences:
    """Compare a folder with its source, where it is not known how it was made.

    Raises:
        InputError: the two have different vocabularies.
    """
    loads, loaded = loading(source), loading(target)
    ids, unseen = sidecars.same_ids(source.opened, target.opened)
    was, now = (
        # Without a dtype in its config, a folder is loaded in that of its weights.
        loading(each).config
        | {"dtype": str(loading(each).config.get("dtype") or TORCH_NAMES[main_dtype(each.tensors)])}
        for each in (source, target)
    )
    deeper = configs.layers_of(was) != configs.layers_of(now)
    copied = configs.copied_layers(source, target) if deeper else None
    keys, other_keys = configs.different_settings(was, now, copied)
    values = [_changed_value(key, was, now) for key in keys]
    changed = [each["name"] for each in values]
    named = [f"{key} in config.json differs" for key in other_keys]
    if was.get("model_type") != now.get("model_type"):
        keys = configs.not_compared(was, now)
        said = "of config.json only what means the same in both classes was compared"
        named.append(said + (f", not {', '.join(keys)}" if keys else ""))
    # Other engines look for the class that a config names; the source may name it otherwise.
    classes, family = target.config.get("architectures"), configs.listed_family(target.config)
    allowed: list[Any] = [[loaded.model], *([[family.architecture]] if family else [])]
    if source.config.get("model_type") == target.config.get("model_type"):
        allowed.append(source.config.get("architectures"))
    if classes and classes not in allowed:
        changed.append("architectures in config.json")
    elif not classes and source.config.get("architectures"):
        named.append("architectures in config.json differs")
    named += _without_effect({**loads.config, **source.config}, target, loaded.model)
    named += [f"not compared: {unseen}"] if unseen else _rewritten(source, target)
    changed += [f"the tokenizer ({ids})"] if ids else []
    changed += sidecars.changed_generation(source.opened, target.opened)
    code = foreign_code(target.opened)
    if code and loaded.own_class and not same_code(source.opened, target.opened):
        changed += code
    changed += _changed_buffers(source, target)
    own = target.opened.code() if target.config.get("auto_map") else []
    known = {*WRITTEN, *code, *own, *_weights_of(target), *sidecars.READ}
    names = [name for name in target.opened.names() if name not in known]
    unknown = [name for name in names if not _is_of_source(name, source, target)]
    changed = [*dict.fromkeys(changed)]
    return FolderDifferences(changed, named, unknown, values, [*changed])


def _is_of_source(name: str, source: Checkpoint, target: Checkpoint) -> bool:
    """Whether no engine reads a file, or the source has it as well."""
    if matches(name, INERT) or (source.opened.has(name) and is_of_tokenizer(name)):
        return True
    with suppress(InputError):  # of a large file, nothing is known
        return source.opened.has(name) and sidecars.same_bytes(source.opened, target.opened, name)
    return False


def _without_effect(wanted: Config, target: Checkpoint, model: str) -> list[str]:
    """Notes on keys in ``config.json`` for which the class uses another value, or none.

    Args:
        wanted: the expected value of every key.
        target: its folder.
        model: the class.
    """
    complete = json.loads(json.dumps(resolved(target.config) or target.config, default=str))
    complete["torch_dtype"] = complete.get("dtype")
    keys = target.config.keys() - (PROVENANCE_KEYS | RENAMED | FREE) | {"torch_dtype"}
    return [
        f"{key} in config.json differs, without effect in {model}"
        for key in sorted(keys & target.config.keys())
        if target.config[key] not in (None, complete.get(key), wanted.get(key))
    ]


def _rewritten(source: Checkpoint, target: Checkpoint) -> list[str]:
    """A note on a tokenizer's files that are not the same bytes."""
    names = sidecars.rewritten(source.opened, target.opened)
    note = f"what transformers does with {listed(names)} was compared, not every byte"
    return [note] if names else []


def _changed_buffers(source: Checkpoint, target: Checkpoint) -> list[str]:
    """Buffers in the files of only one, or of the same shape in both, but with other values."""
    loads, loaded = loading(source), loading(target)
    changed = sorted(loads.made_buffers ^ loaded.made_buffers)
    for name in sorted(loads.buffers.keys() & loaded.buffers.keys()):
        one, other = loads.buffers[name], loaded.buffers[name]
        same_shape = source.tensors[one].shape == target.tensors[other].shape
        if same_shape and not source.read(one).equal(target.read(other)):
            changed.append(other)
    return changed


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _weights_of(checkpoint: Checkpoint) -> set[str]:
    """The names of the files with the weights, and of their index if there are several."""
    names = {file.name for file in checkpoint.files}
    indices = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    return names | ({*indices} if not names & {"model.safetensors", "pytorch_model.bin"} else set())


def _is_read(name: str, runs: bool) -> bool:
    """Whether what was added would be read as weights, or run as code."""
    if "/" in name:
        return name.startswith(GENERATE.split("/")[0] + "/")
    return matches(name, WEIGHTS) or (runs and name.endswith(".py"))


def _holds(target: Checkpoint, name: str, content: bytes) -> bool:
    return bool(target.opened.find(name)) and target.opened.bytes(name) == content


def _changed_value(key: str, wanted: Config, found: Config) -> ChangedValue:
    """A key, possibly nested, with its expected and its actual value."""
    was, now = (_shown(key, each) for each in (wanted, found))
    return ChangedValue(name=f"{key} in config.json", expected=was, found=now)


def _shown(key: str, config: Config) -> str | None:
    """The value of a key as JSON; None where it is not set, or too long for a sentence."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else None


def _first_changed_key(wanted: Config, found: Config) -> list[ChangedValue]:
    """The first key that has another value, once both configs say what they leave out.

    A key that the class derives from other keys is in neither file, and is not reported.
    """
    written = (wanted.keys() | found.keys()) - FREE
    first, second = resolved(wanted), resolved(found)
    if first is None or second is None:
        first, second = wanted, found
    # The class ignores the code that a config names, and keys such as a second rope_theta.
    passed_over = (found.keys() | wanted.keys()) - first.keys() - second.keys() - RENAMED
    first |= {key: wanted[key] for key in passed_over if wanted.get(key) is not None}
    second |= {key: found[key] for key in passed_over if found.get(key) is not None}
    missing: Any = object()
    keys = sorted((first.keys() | second.keys()) - FREE, key=lambda key: (key not in written, key))
    changed = (k for k in keys if first.get(k, missing) != second.get(k, missing))
    return [_changed_value(key, first, second) for key in islice(changed, 1)]


def _changed_by_plan(source: Checkpoint, planned: Config) -> list[ChangedValue]:
    """Keys that the plan itself resolves to other values than the source, sizes aside."""
    was, now = (resolved_as_loaded(each, str(source.folder)) for each in (source.config, planned))
    if was is None or now is None:
        return []
    keys, _ = configs.different_settings({**was, "dtype": None}, {**now, "dtype": None})
    return [_changed_value(key, was, now) for key in keys]


GENERATE = "custom_generate/generate.py"


def named_code(folder: Folder) -> dict[str, Any]:
    """What names code that transformers would run: ``{file: its auto_map}``, and own generation."""
    found: dict[str, Any] = {GENERATE: True} if folder.has(GENERATE) else {}
    for name in folder.names("*config.json"):
        with suppress(InputError):  # its reader reports the error
            if "/" not in name and (auto_map := folder.json(name).get("auto_map")):
                found[name] = auto_map
    return found


def foreign_code(folder: Folder) -> list[str]:
    """Names of the files that name code which is not growkit's own, and of that code."""
    named, config = named_code(folder), folder.json("config.json")
    family, own = configs.listed_family(config), growkits_code(config)
    growkits = {"config.json": dict(family.auto_map)} if family and family.auto_map else {}
    code = own_code(folder)
    if not named or (own and named == growkits and code == own):
        return []
    text = json.dumps(named)
    named_first = sorted(code, key=lambda name: name.removesuffix(".py") not in text)
    # Code that growkit does not write comes first, and of that what is named.
    return [*named, *sorted(named_first, key=lambda name: code[name] == own.get(name))]


def same_code(first: Folder, second: Folder) -> bool:
    """Whether two folders name the same code, and hold it byte for byte."""
    return named_code(first) == named_code(second) and own_code(first) == own_code(second)


def own_code(folder: Folder) -> dict[str, bytes]:
    """The code in a folder, by file name."""
    return {name: folder.bytes(name) for name in folder.code()}


def growkits_code(config: Config) -> dict[str, bytes]:
    """The code that growkit writes with such a model, by file name; empty for most."""
    family = configs.listed_family(config)
    if family is None or family.write_code is None:
        return {}
    with temporary("code") as scratch:
        family.write_code(scratch)
        return {path.name: path.read_bytes() for path in sorted(scratch.glob("*.py"))}


def _has_earlier_code(target: Checkpoint, wanted: Config) -> bool:
    """Whether a folder has the code of another version of growkit, as its manifest records it."""
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
        and all(wanted["auto_map"].get(key) == name for key, name in classes.items())
    )
