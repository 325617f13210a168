"""Help texts of options as descriptions of fields, which docstrings have only at run time."""

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Reads fields such as ``seed: int = option(0, "Seed of everything random.")``."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Describe a field; Griffe calls this for every attribute."""
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "option":
            known = constants(ast.parse(attr.filepath.read_text("utf-8")))
            attr.docstring = griffe.Docstring(text(call.args[1], known), parent=attr)
            attr.value = ast.unparse(call.args[0])


def constants(module: ast.Module) -> dict[str, str]:
    """Values that a module assigns to names, also several at once."""
    known = {}
    for line in module.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant | ast.Tuple):
            pairs = [(line.targets[0], line.value)]
            if isinstance(line.targets[0], ast.Tuple) and isinstance(line.value, ast.Tuple):
                pairs = list(zip(line.targets[0].elts, line.value.elts, strict=True))
            known |= {ast.unparse(name): ast.unparse(value).strip("'") for name, value in pairs}
    return known


def text(string: Any, known: dict[str, str]) -> str:
    """A string, with constants in place of their names."""
    if isinstance(string, ast.Constant):
        return string.value
    if isinstance(string, ast.JoinedStr):
        return "".join(text(part, known) for part in string.values)
    name = ast.unparse(string.value if isinstance(string, ast.FormattedValue) else string)
    return known.get(name, name)
