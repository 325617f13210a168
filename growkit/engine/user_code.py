"""Code of a model folder, which runs only if the user asks for it."""

from growkit.model.checkpoint.folder import Folder

TRUSTED: dict[str, dict[str, bytes]] = {}
"""Files of code by the name of the model class that came from them."""


def is_trusted(opened: Folder, model: str) -> bool:
    """Whether a model class came from the same code as a folder has."""
    return model in TRUSTED and TRUSTED[model] == own_code(opened)


def own_code(folder: Folder) -> dict[str, bytes]:
    """The code in a folder, by file name."""
    return {name: folder.bytes(name) for name in folder.code()}
