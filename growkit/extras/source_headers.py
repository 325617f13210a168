"""The headers of the model from which a folder was made, as its manifest records them."""

from collections.abc import Collection
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import STORED_NAMES
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.families.family import Family, family_of
from growkit.model.model import Headers


def source_headers(target: Folder, names: Collection[str], described: Family | None) -> Headers:
    """The headers of the model from which a folder was made, as its manifest records them.

    Args:
        target: the folder, with a manifest.
        names: the names of its tensors, which are stored in the form of the source's.
        described: a family that the manifest describes.

    Raises:
        InputError: the manifest is damaged, or of a version that does not record them.
    """
    file, recorded = target.path / MANIFEST, target.json(MANIFEST).get("source_model")
    match recorded:
        case {"config": dict(config), "dtype": str(main), "other_dtypes": dict(others)} if {
            main,
            *others.values(),
        } <= STORED_NAMES.keys():
            pass
        case _:
            raise InputError(
                f"{file} does not record the config and the dtypes of the source "
                f"('source_model'); make the folder again with 'growkit run {file}'"
            )
    where = f"the model from which {target} was made"
    family = family_of(config, where, described).as_stored(config, names)
    headers = Headers(family, config, where)
    headers.tensors = {
        name: replace(info, dtype=others.get(name, main)) for name, info in headers.tensors.items()
    }
    return headers
