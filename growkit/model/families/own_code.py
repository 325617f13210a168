"""Models of growkit's own: files ``modeling_NAME.py`` in the package and its extras.

Such a file has the classes of a model. It is copied next to the weights, with the files beside it
that it imports, so that a folder loads without growkit: they do not import growkit. The config may
be in one of these files. A model that only growkit writes has the description of its family in the
same file::

    DESCRIPTION = \"\"\"
    family: My model
    ...
    \"\"\"
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGES = "growkit.model.families", "growkit.extras"
"""Their folders have the models, and the descriptions of families."""

_IMPORTED = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)
_HEAD = re.compile(r"^class (\w+)ForCausalLM\(", re.MULTILINE)


def folders() -> dict[Path, str]:
    """The folders of ``PACKAGES``, each with the name of its package."""
    return {Path(at): name for name in PACKAGES for at in import_module(name).__path__}


def modeling_files() -> dict[str, Path]:
    """The models' files, by their names without ``modeling_``."""
    return _files(tuple(folders()))


@cache
def _files(folders: tuple[Path, ...]) -> dict[str, Path]:
    files = (file for folder in folders for file in sorted(folder.rglob("modeling_*.py")))
    return {file.stem.removeprefix("modeling_"): file for file in files}


def code_of(file: Path) -> dict[str, bytes]:
    """The files of a model's code, by name: its own, and those that it imports."""
    code: dict[str, bytes] = {}
    needed = [file.name]
    while needed:
        name = needed.pop()
        code[name] = file.with_name(name).read_bytes()
        imported = _IMPORTED.findall(code[name].decode())
        needed += {f"{module}.py" for module in imported}.difference(code)
    return code


def auto_map_of(file: Path) -> dict[str, str]:
    """The ``auto_map`` of ``config.json``: the module and name of each class, by auto class."""
    code = {Path(name).stem: text.decode() for name, text in code_of(file).items()}
    head = _HEAD.search(code[file.stem])
    assert head is not None
    classes = re.compile(rf"^class ({head[1]}(Config|Model|For\w+))\(", re.MULTILINE)
    return {
        f"Auto{kind if kind in ('Config', 'Model') else f'Model{kind}'}": f"{module}.{name}"
        for module, text in sorted(code.items())
        for name, kind in classes.findall(text)
    }


def package_of(file: Path) -> str:
    """The package whose module a file is."""
    folder, name = next(pair for pair in folders().items() if file.is_relative_to(pair[0]))
    return ".".join([name, *file.parent.relative_to(folder).parts])
