"""Sources of models: a local folder, or the Hub.

All code that reads a model finds it here. A model on the Hub has an id and a commit. Only the files
that growkit reads are fetched, into the cache of transformers; the model is then a folder like any
other (``growkit.model.checkpoint.folder``).

Extras read quantised weights as dense ones, and take the language model out of a multimodal one.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from growkit.base.errors import InputError, reason
from growkit.base.lazy import of_extras
from growkit.base.tensors import Config
from growkit.engine.transformers_class import OLDER_ROPE_KEYS, PROVENANCE_KEYS, parsed, quiet
from growkit.engine.user_family import NAMED, described_family
from growkit.model.checkpoint.folder import (
    HUB_NAME,
    SINGLE,
    Folder,
    address_in,
    check_name,
    small_files,
)
from growkit.model.checkpoint.format import find_format, read_config
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import Family, family_of, known_family
from growkit.model.model import Headers, Model

SCHEME = "hf:/"
"""Beginning of an address after conversion to a path, which merges the two slashes."""

ADDRESS = re.compile(r"(?:hf:/+)?(?P<name>[^@]+?)/?(?:@(?P<revision>\w[\w./+-]*))?", re.ASCII)
"""``hf://ORG/NAME@REVISION``; scheme and revision are optional."""

NAME = re.compile(r"\w[\w.-]*", re.ASCII)
"""Name of a model without an organisation, which needs ``hf://`` before it."""

REFUSALS = {
    "GatedRepoError": (
        "{given} is gated on the Hub; accept its terms there, and sign in with 'hf auth login'"
    ),
    "RevisionNotFoundError": (
        "{name} has no revision {revision!r} on the Hub; give a branch, tag or commit of it, such "
        "as main"
    ),
    "RepositoryNotFoundError": (
        "{given} is not a folder, and the Hub has no model {name} for you; check the name, or sign "
        "in with 'hf auth login' if the model is private"
    ),
}
"""Sentences for errors of huggingface_hub."""

NOT_FOUND = (
    "{given} is not a folder here, nor in the cache of the Hub, and {why}; if it is a model on the "
    "Hub, download it where the Hub can be reached (hf download {name} --local-dir {folder}), and "
    "give that folder"
)
"""Sentence for any other error."""


@dataclass(frozen=True)
class Source:
    """A located model, not read yet.

    Attributes:
        name: a globally valid address, or the path as given.
        folder: the folder with its files.
        by_address: whether ``name`` is an address.
        base_model: its name in a model card; None for a folder, or without an organisation.
        warning: a warning for users; empty for none.
    """

    name: str
    folder: Path
    by_address: bool = False
    base_model: str | None = None
    warning: str = ""

    def open_whole(self, described: Family | None = None) -> Checkpoint:
        """Open the checkpoint; a quantised one is read as a dense model.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or growkit does not read the quantised weights.
        """
        checkpoint = Checkpoint(self.folder)
        for extra in _extras("dequantising"):
            checkpoint = extra.dense(checkpoint)
        checkpoint.published = checkpoint.config
        checkpoint.config = with_keys_of_class(checkpoint.config)
        checkpoint.described = described
        return checkpoint

    def open(self, described: Family | None = None) -> Checkpoint:
        """Open the checkpoint, or the language model inside a multimodal one.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or transformers does not accept its config.
        """
        return language_model_of(self.open_whole(described))

    def headers(self, described: Family | None = None) -> Model:
        """Open the checkpoint for a plan; without weights, the headers that its config implies.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or no family knows the model.
        """
        folder = Folder(self.folder)
        try:
            find_format(folder)
        except InputError:
            config = read_config(folder)
            folder.check_files()
            where = str(folder.path / "config.json")
            config, quantised = _dense_config(config, where)
            config = with_keys_of_class(config)
            headers = Headers(family_of(config, where, described), config, where)
            headers.quantised = quantised
            return headers
        return self.open_whole(described)


def _extras(name: str) -> list[ModuleType]:
    """The modules of a name in the extras: they read checkpoints in other ways."""
    return [import_module(extra) for extra in of_extras(name)]


def _dense_config(config: Config, where: str) -> tuple[Config, str]:
    """The config of the dense model, and how a quantised one is stored; empty for a dense one."""
    stored = ""
    for extra in _extras("dequantising"):
        config, stored = extra.dense_config(config, where)
    return config, stored


def find(model: Path | str, *, weights: bool = True) -> Source:
    """Find a model, and fetch it if it is on the Hub.

    Args:
        model: a path, or an address (see ``address_of``).
        weights: whether weights are needed, or only the files next to them.

    Raises:
        InputError: the address is malformed, or the model cannot be fetched. For a path, opening
            the model reports errors.
    """
    address = address_of(model)
    if address is None:
        return Source(str(Path(model)), Path(model))
    name, revision = address
    folder, warning = fetch(name, revision, str(model), weights)
    base_model = name if "/" in name else None
    return Source(f"hf://{name}@{folder.name}", folder, True, base_model, warning)


def open_both(source: Source, target: Source) -> tuple[Checkpoint, Checkpoint]:
    """Open two models for a comparison, or the language models inside of multimodal ones.

    Raises:
        InputError: see ``Source.open``.
    """
    after = target.open_whole()
    if after.wrappers:
        raise InputError(f"{after.notes[0]}, but users would not; save the model without them")
    before = source.open_whole()
    inner, inner_after = language_model_inside(before), language_model_inside(after)
    if inner_after:  # a check of the extra compares the rest
        return inner or before, inner_after
    same = inner and inner.config.get("model_type") == after.config.get("model_type")
    return inner if inner and same else language_model_of(before), after


# The Hub


def address_of(source: Path | str) -> tuple[str, str | None] | None:
    """Parse name and revision (None for the default) of a model on the Hub; None for a path.

    An address begins with ``hf://``, or has the form ``ORG/NAME`` or ``ORG/NAME@REVISION`` while
    there is no folder ``ORG``.

    Raises:
        InputError: it begins with ``hf://``, but is no address.
    """
    text = str(source)
    check_name(text)
    match = ADDRESS.fullmatch(text)
    name = match["name"] if match else ""
    usable = bool(HUB_NAME.fullmatch(name)) and ".." not in text
    if text.startswith(SCHEME) or (text == SCHEME[:-1] and not os.path.lexists(text)):
        if not match or ".." in text or not (usable or NAME.fullmatch(name)):
            address = address_in(text if "/" in text else f"{text}/")
            raise InputError(
                f"{address} is not an address of a model on the Hub; write "
                "hf://ORG/NAME@REVISION, such as hf://meta-llama/Llama-3.2-1B@main"
            )
        return name, match["revision"]
    known = os.path.lexists(text) or os.path.lexists(Path(text).parent)
    return (name, match["revision"]) if match and usable and not known else None


def fetch(name: str, revision: str | None, address: str, weights: bool) -> tuple[Path, str]:
    """Fetch a model; return its folder in the cache, and a warning if only the cache has it.

    Args:
        name: name of the model.
        revision: its branch, tag or commit; None for the default one.
        address: the address as given.
        weights: whether weights are needed, or only the files next to them.

    Raises:
        InputError: there is no such model or revision, or neither the Hub nor the cache provides
            it.
    """
    from huggingface_hub import snapshot_download

    try:
        return _download(name, revision, weights), ""
    except InputError:
        raise
    except Exception as error:  # the cache may have it nevertheless
        failure, why = error, _why(error)
    address = address_in(address)
    try:
        cached = snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except (OSError, ValueError):  # not there, or under a name that nothing can have
        refusal = REFUSALS.get(type(failure).__name__, NOT_FOUND)
        values = {"given": address, "name": name, "revision": revision or "main", "why": why}
        raise InputError(refusal.format(**values, folder=name.rpartition("/")[2])) from failure
    folder = Folder(cached)
    try:
        if weights:
            find_format(folder)
    except InputError as missing:
        raise InputError(
            f"{address} is incomplete in the cache of the Hub ({missing}), and {why}; "
            f"download the rest where the Hub can be reached (hf download {name})"
        ) from failure
    return folder.path, (
        f"{name} was read from the cache of the Hub without an update, since {why}; files that are "
        "not in the cache, such as a tokenizer, are missing"
    )


def _download(name: str, revision: str | None, weights: bool) -> Path:
    """Download every file of a model that growkit reads, and return its folder in the cache."""
    from huggingface_hub import HfApi, snapshot_download

    def fetch(names: list[str], at: str | None) -> Folder:
        wanted = [escape(file) for file in names]
        return Folder(snapshot_download(name, revision=at, allow_patterns=wanted))

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # one sentence reports what goes wrong
    try:
        about = HfApi().model_info(name, revision=revision)
        listed = {sibling.rfilename for sibling in about.siblings or []}
        small = small_files(name, listed)
        folder = fetch(small, revision)  # by its name, which the cache then knows as well
        commit = folder.path.name
        if commit != about.sha:
            raise InputError(f"{name} was changed on the Hub just now; run this again")
        for single, index in SINGLE.items() if weights else ():  # in the order of ``weight_files``
            names = {single}
            if single not in listed and index in listed:
                mapped = folder.json(index).get("weight_map")
                names = set(map(str, mapped.values())) if isinstance(mapped, dict) else set()
            if names & listed:
                fetch([*small, *(names & listed)], commit)
                break
        return folder.path
    finally:
        logger.setLevel(level)


def _why(error: Exception) -> str:
    """The reason for the Hub's failure, as part of a sentence."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE forbids access to the Hub"
    quoted = reason(error).partition(" for url")[0]
    return f"the Hub did not deliver it ({type(error).__name__}: {quoted})"


def language_model_of(checkpoint: Checkpoint) -> Checkpoint:
    """Extract the language model of a multimodal checkpoint; return any other unchanged.

    Raises:
        InputError: transformers does not accept the config of the whole model.
    """

    def is_known(model: Model) -> bool:
        return known_family(model.config, model.described) is not None

    if is_known(checkpoint):
        return checkpoint
    inner = language_model_inside(checkpoint)
    return inner if inner and is_known(inner) else checkpoint


def language_model_inside(checkpoint: Checkpoint) -> Checkpoint | None:
    """The language model inside a multimodal checkpoint; None if none can be taken out.

    Raises:
        InputError: transformers does not accept the config of the whole model.
    """
    views = (extra.view_inside(checkpoint) for extra in _extras("language_models"))
    return next(filter(None, views), None)


def _config_inside(whole: Config, folder: Path) -> Config | None:
    """The config of the language model inside a multimodal one; None if there is none."""
    configs = (extra.config_inside(whole, folder) for extra in _extras("language_models"))
    return next(filter(None, configs), None)


def with_keys_of_class(config: Config) -> Config:
    """Write a config with old keys as its class saves it, if growkit does not describe its family.

    A class may read an old key in place of its own, as a pattern of letters for the kinds of
    layers. Growth would then change a key that the class does not read. Former names of kinds of
    layers become those of the class. What cannot be parsed stays as it is.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or known_family(config):
        return config
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return config
    with suppress(Exception), quiet():
        saved: Config = json.loads(parsed(config).to_json_string(use_diff=False))
        names = CONFIG_MAPPING[kind].attribute_map
        parts = _parts_read(config)
        if parts or config.keys() - {*saved, *names, *NAMED, *PROVENANCE_KEYS, *OLDER_ROPE_KEYS}:
            kept = {*NAMED, *PROVENANCE_KEYS} - {*names}
            dropped = {*PROVENANCE_KEYS, *parts}
            own = {key: value for key, value in saved.items() if key not in dropped}
            return own | {key: value for key, value in config.items() if key in kept}
        keys = {key: names.get(key, key) for key in config}
        renamed = {key for key, own in keys.items() if _renamed(config[key], saved.get(own))}
        rest = {key: value for key, value in config.items() if key not in renamed}
        return rest | {keys[key]: saved[keys[key]] for key in sorted(renamed)}
    return config


def _parts_read(config: Config) -> set[str]:
    """The parts of a config whose entries its class reads in place of keys of its own."""
    kind = {"model_type": config["model_type"]}
    own = parsed(kind).to_dict().keys() - PROVENANCE_KEYS
    parts = set()
    for key in config.keys() - own - PROVENANCE_KEYS - {*OLDER_ROPE_KEYS}:
        if isinstance(config[key], dict):
            numbers = {name: 2 * of for name, of in config[key].items() if type(of) is int}
            read, other = (
                parsed({**config, key: part}).to_dict() for part in (config[key], numbers)
            )
            parts |= {key} if any(read.get(name) != other.get(name) for name in own) else set()
    return parts


def _renamed(written: Any, read: Any) -> bool:
    """Whether a class reads a list of words, such as kinds of layers, as other words."""
    lists = isinstance(written, list) and isinstance(read, list) and len(written) == len(read)
    return lists and written != read and all(isinstance(word, str) for word in (*written, *read))


def family_for(source: Source, description: Mapping[str, Any] | None) -> Family | None:
    """The described family of a source; extras describe types of which growkit has none.

    Args:
        source: the source.
        description: a description by a user; None for none.

    Returns:
        The family; None if growkit's own describe the source.

    Raises:
        InputError: the description is invalid, parts of its class cannot be described, or its
            quantised weights are not read.
    """
    folder = Folder(source.folder)
    config = read_config(folder)
    kind = config.get("model_type")
    if description is not None or not isinstance(kind, str) or known_family(config):
        return described_family(description)
    where = str(source.folder / "config.json")
    config, _ = _dense_config(config, where)
    config = _config_inside(config, source.folder) or with_keys_of_class(config)
    if known_family(config):
        return None
    for extra in _extras("families"):
        if inferred := extra.describe(config, where):
            return described_family(*inferred)
    return None
