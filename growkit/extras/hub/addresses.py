"""Models on the Hub, by their addresses.

A model on the Hub has an id and a commit. Only the files that growkit reads are fetched, into the
cache of transformers; the model is then a folder like any other.
"""

import logging
import os
import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from growkit.base.errors import InputError, reason
from growkit.model.checkpoint.folder import (
    CARD,
    CARRIED,
    HUB_NAME,
    SINGLE,
    SMALL,
    Folder,
    address_in,
    check_name,
    check_names,
    matches,
)
from growkit.model.checkpoint.format import find_format
from growkit.sources import Source

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


def find_at_address(model: Path | str, weights: bool) -> Source | None:
    """Find a model on the Hub and fetch it; None for a path. See ``growkit.sources.find``."""
    address = address_of(model)
    if address is None:
        return None
    name, revision = address
    folder, warning = fetch(name, revision, str(model), weights)
    base_model = name if "/" in name else None
    return Source(f"hf://{name}@{folder.name}", folder, True, base_model, warning)


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


def small_files(where: str, names: Iterable[str]) -> list[str]:
    """Select the files that growkit reads besides the weights.

    Raises:
        InputError: see ``check_names``.
    """
    check_names(where, names)

    def is_read(name: str) -> bool:
        top, *below = name.split("/")
        patterns = CARRIED if below else (*CARRIED, *SMALL, "*.txt", "*.vocab", CARD)
        return ".." not in below and matches(top, patterns)

    return [*filter(is_read, names)]
