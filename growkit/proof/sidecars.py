"""Sidecars: the tokenizer and other files next to the weights, which are copied unchanged.

Loading a folder with transformers and saving it rewrites them: spaces change, defaults are filled
in, files are merged or split. So files whose bytes differ are compared as transformers reads them.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, foreign
from growkit.base.tensors import Config
from growkit.engine.loader import generation
from growkit.engine.prompts import first_difference, load_tokenizer
from growkit.engine.transformers_class import quiet
from growkit.engine.transformers_internals import generation_defaults
from growkit.model.checkpoint.folder import GENERATION, TEMPLATES, Folder, is_of_tokenizer, matches
from growkit.model.checkpoint.folder import TOKENIZER_FILES as FILES
from growkit.model.checkpoint.publishing import write_json
from growkit.model.checkpoint.scratch import in_temporary
from growkit.proof.config_comparison import single_token

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
SAVED = (TOKENIZER, SETTINGS, "chat_template.jinja", f"{TEMPLATES}/*")
"""Files that transformers writes when it saves a tokenizer."""

VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
LEFT_OUT = (*VOCABULARIES, SPECIAL, ADDED, "chat_template.json")
"""Files that it does not write, since those in ``SAVED`` contain them."""

PROCESSORS = ("*processor_config.json", "audio_tokenizer_config.json", "chat_template.json")
"""Files that transformers reads for multimodal models."""

READ = (TOKENIZER, SETTINGS, GENERATION)
"""Files that are compared as transformers loads them."""

TOKENIZER_PROVENANCE = ("model_type", "tokenizer_class", "transformers_version")
"""Keys of ``config.json`` that affect how transformers reads a tokenizer's files."""

CLASS_DEFAULTS = (
    *("padding_side", "truncation_side", "clean_up_tokenization_spaces", "model_input_names"),
)
"""Settings for which classes of tokenizers have defaults of their own."""

SAVING_KEYS = frozenset(
    {"transformers_version", "_from_model_config", "tokenizer_class", "processor_class"}
    | {"name_or_path", "backend", "is_local", "local_files_only", "_commit_hash"}
)
"""Keys that record how a file was made."""


RETURNED = re.compile("output_.*|return_dict_in_generate")
"""Keys of settings of generation that only say what else is returned."""

CALL_KEYS = frozenset(
    {"max_length", "stride", "truncation_strategy", "pad_token_type_id", "pad_to_multiple_of"}
)
"""Settings of truncation and padding that transformers stores, but sets in every call."""


def changed_sidecars(source: Folder, target: Folder) -> list[str]:
    """Names of sidecars whose content differs from the source's.

    Files of a tokenizer are equal if both tokenizers load and are equivalent; generation settings
    are equal if they are after defaults are filled in. If no tokenizer loads, bytes are compared. A
    file that the source lacks is a change if transformers reads it and it does not only repeat
    other files.
    """
    names, had = source.carried(), {*source.names()}
    differ = [name for name in names if not same_bytes(source, target, name)]
    differ += [name for name in target.names(*FILES, GENERATION, *PROCESSORS) if name not in had]
    read = [name for name in differ if is_of_tokenizer(name)]
    changed: list[str] = []
    # config.json may make another tokenizer of the same files.
    was, now = (f.json("config.json") if f.has("config.json") else {} for f in (source, target))
    depends = any(was.get(key) != now.get(key) for key in TOKENIZER_PROVENANCE)
    if has_tokenizer(source) and (read or depends):
        changed = _changed_in_tokenizer(source, target, read)
        differ = [name for name in differ if name not in read]
    return changed + [name for name in differ if not _same_json(source, target, name)]


def changed_files(source: Folder, target: Folder) -> list[str]:
    """Files beside a tokenizer's that the source has with another content.

    Files of processors are also changed if only one folder has them.
    """
    processors = {*source.names(*PROCESSORS), *target.names(*PROCESSORS)}
    both = processors.union(name for name in source.carried() if target.has(name))
    return [
        name
        for name in sorted(both)
        if name != GENERATION and not is_of_tokenizer(name)
        if not same_bytes(source, target, name) and not _same_json(source, target, name)
    ]


def is_compared(name: str) -> bool:
    """Whether ``changed_sidecars`` reports a file that was added."""
    return is_of_tokenizer(name) or ("/" not in name and matches(name, (GENERATION, *PROCESSORS)))


def _changed_in_tokenizer(source: Folder, target: Folder, differ: list[str]) -> list[str]:
    """Find the files that make another tokenizer.

    Args:
        source: the source.
        target: the target.
        differ: files of the tokenizer whose bytes differ.
    """
    first, second = _loaded(source), _loaded(target)
    if first is None and second is None and not differ:
        return []
    if first is None or second is None or first_difference(first, second):
        return differ or ["the tokenizer, which depends on config.json,"]
    changed = [name for name in differ if not _explained(name, source, target, first)]
    return changed + [SETTINGS] * (
        SETTINGS in differ and _contradict(source, target, first, second)
    )


def rewritten(source: Folder, target: Folder) -> list[str]:
    """Files of a tokenizer that both folders have, with different bytes."""
    names = [name for name in source.names(*FILES) if is_of_tokenizer(name) and target.has(name)]
    return [name for name in names if not same_bytes(source, target, name)]


def _settings(folder: Folder) -> dict[str, Any]:
    """The settings of a tokenizer that have a value; empty if they cannot be read."""
    with suppress(InputError):
        return _given(folder.json(SETTINGS)) if folder.has(SETTINGS) else {}
    return {}


def same_ids(before: Folder, after: Folder) -> tuple[str | None, str | None]:
    """Compare the tokenizers of two folders.

    Returns:
        The first difference, or None; and a note on what was not compared, and why, or None.
    """
    without = [folder for folder in (before, after) if not has_tokenizer(folder)]
    if without:
        return None, f"the tokenizer, because {without[0]} has none" if len(without) == 1 else None
    first, second = _loaded(before), _loaded(after)
    if first is None and second is None:
        return None, "the tokenizers, because they do not load"
    if first is None or second is None:
        return f"that of the {'source' if first is None else 'target'} cannot be loaded", None
    ids, others = first.get_vocab(), second.get_vocab()
    differing = [token for token in {*ids, *others} if ids.get(token) != others.get(token)]
    if differing:
        token = min(differing, key=lambda word: (ids.get(word, len(ids)), word))
        both = (vocabulary.get(token) for vocabulary in (ids, others))
        was, became = ("none" if number is None else f"number {number}" for number in both)
        return f"token {token!r} is {was} in the source and {became} in the target", None
    difference = first_difference(first, second) or _other_rules(before, after, first, second)
    if difference is None and _contradict(before, after, first, second):
        difference = f"a setting in {SETTINGS}"
    return difference, None


def _other_rules(before: Folder, after: Folder, first: Any, second: Any) -> str | None:
    """Find a changed file with rules of a tokenizer in Python, whose rules cannot be inspected."""
    if any(
        getattr(tokenizer, "backend_tokenizer", None) is not None for tokenizer in (first, second)
    ):
        return None
    names = rewritten(before, after)
    rules = [name for name in names if not matches(name, (*SAVED, SPECIAL, ADDED))]
    return next((name for name in rules if not _same_json(before, after, name)), None)


def changed_generation(before: Folder, after: Folder) -> list[str]:
    """Generation settings that transformers resolves to different values in two folders."""
    first, second = generation(before), generation(after)
    if first is None or second is None:
        same = (first, second) == (None, None) and same_bytes(before, after, GENERATION)
        return [] if same else [GENERATION]
    one, other = _in_effect(first), _in_effect(second)
    changed = [key for key in sorted(one | other) if one.get(key) != other.get(key)]
    return [f"{key} in the generation settings" for key in changed]


def _in_effect(settings: Config) -> dict[str, Any]:
    """Settings of generation with their defaults, but for those of what is returned beside text."""
    settings = generation_defaults() | _given(settings)
    plain = {key: single_token(key, value) for key, value in settings.items()}
    return {key: value for key, value in plain.items() if not RETURNED.fullmatch(key)}


def write_generation(source: Folder, target: Folder) -> None:
    """Write the source's generation settings, if the config of a written target gives others."""
    settings = generation(source)
    if settings is not None and changed_generation(source, target):
        write_json(target.path / GENERATION, _given(settings))


def tokenizer_to_write(source: Folder, config: Config) -> dict[str, Any]:
    """The files that a target must have so that its tokenizer is the source's.

    The class that transformers chooses depends on the type of the model. So it may load the same
    files as another tokenizer, for example if it corrects the class that the files of a type name;
    the class that it chooses may also have other defaults, or follow the rules of a file where the
    source's class has its own.

    Args:
        source: the source.
        config: the planned config of the target.

    Returns:
        JSON by file name; empty if the files as they are give the same tokenizer.

    Raises:
        InputError: the tokenizer would be another one, whatever is written.
    """
    first = _loaded(source) if has_tokenizer(source) else None
    if first is None:
        return {}
    settings = source.json(SETTINGS) if source.has(SETTINGS) else {}
    named = {**settings, "tokenizer_class": type(first).__name__}
    with_defaults = named | {key: getattr(first, key, None) for key in CLASS_DEFAULTS}
    ways: list[dict[str, Any]] = [{}, {SETTINGS: named}, {SETTINGS: with_defaults}]
    backend = getattr(first, "backend_tokenizer", None)
    if backend is not None:
        ways.append({SETTINGS: with_defaults, TOKENIZER: json.loads(backend.to_str())})

    def first_way(scratch: Path) -> dict[str, Any]:
        for name in filter(is_of_tokenizer, source.carried()):
            source.copy(name, scratch)
        write_json(scratch / "config.json", config)
        for way in ways:
            for name, content in way.items():
                write_json(scratch / name, content)
            second = _loaded(Folder(scratch))
            if second is not None and first_difference(first, second) is None:
                return way
        raise InputError(
            f"transformers would load another tokenizer from the files of {source} if model_type "
            f"is {config.get('model_type')!r}; save it anew with transformers "
            "(AutoTokenizer.from_pretrained, save_pretrained), or move its files away"
        )

    return in_temporary("tokenizer", first_way, lambda way: not way)


def has_tokenizer(folder: Folder) -> bool:
    """Whether a folder has a vocabulary, and not only settings of a tokenizer."""
    return bool(folder.names(TOKENIZER, *VOCABULARIES))


def _explained(name: str, source: Folder, target: Folder, tokenizer: Any) -> bool:
    """Whether saving the source's tokenizer explains that a file is changed, new or missing."""
    if source.has(name):
        saved = not target.has(name) if matches(name, LEFT_OUT) else matches(name, SAVED)
        return saved or _same_json(source, target, name)
    if name not in (SPECIAL, ADDED):
        return matches(name, SAVED)
    with suppress(InputError):
        content = target.json(name)
        if name == ADDED:
            return bool(content.items() <= tokenizer.get_vocab().items())
        return all(str(getattr(tokenizer, k, None)) == _plain(v) for k, v in content.items())
    return False


def same_bytes(source: Folder, target: Folder, name: str) -> bool:
    """Whether both folders have the same file, or neither has it."""
    paths = source.find(name), target.find(name)
    if None in paths:
        return paths == (None, None)
    return source.bytes(name) == target.bytes(name)


def _same_json(source: Folder, target: Folder, name: str) -> bool:
    """Whether two JSON files are equal; a null value equals a missing key."""
    if name == GENERATION and target.has(name):
        return not changed_generation(source, target)
    if name.endswith(".json") and source.has(name) and target.has(name):
        with suppress(InputError):
            return _given(source.json(name)) == _given(target.json(name))
    return False


def _contradict(source: Folder, target: Folder, first: Any, second: Any) -> bool:
    """Whether settings of the target contradict the source's; each folder may leave keys out.

    In transformers one file overrides another, so the loaded tokenizers do not show every setting.
    A key that transformers drops from both tokenizers when it saves them has no effect. Structured
    values, which have several forms, are compared as transformers saves them.

    Args:
        source: the source.
        target: the target.
        first: tokenizer of the source.
        second: tokenizer of the target.
    """
    was, now = _settings(source), _settings(target)
    both = now.keys() & was.keys()
    pairs = [(_plain(was[key]), _plain(now[key])) for key in both]
    if any(old != new for old, new in pairs if not isinstance(old, list | dict)):
        return True
    if was == now:
        return False
    saved, again = _given(_saved_settings(first)), _given(_saved_settings(second))
    for key in CLASS_DEFAULTS:  # one class has by default what is written for another
        saved[key], again[key] = getattr(first, key, None), getattr(second, key, None)
    keys = (saved.keys() | again.keys()) - CALL_KEYS
    if any(saved.get(key) != again.get(key) for key in keys):
        return True
    added = (now.keys() - was.keys()) & saved.keys()
    return any(_plain(now[key]) != _plain(saved[key]) for key in added)


def _saved_settings(tokenizer: Any) -> Mapping[str, Any]:
    """The settings that transformers writes when it saves a tokenizer."""

    def save(scratch: Path) -> Mapping[str, Any]:
        with quiet(), foreign("the tokenizer cannot be saved", "repair its files"):
            tokenizer.save_pretrained(scratch)
        return Folder(scratch).json(SETTINGS)

    with suppress(InputError):
        return in_temporary("tokenizer", save)
    return {}


def _plain(value: Any) -> Any:
    """A setting; for a token with properties, only its text."""
    return value.get("content", value) if isinstance(value, dict) else value


def _given(content: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in content.items() if v is not None and k not in SAVING_KEYS}


def _loaded(folder: Folder) -> Any:
    """The tokenizer of a folder; None if it does not load."""
    with suppress(InputError):
        return load_tokenizer(folder)
    return None
