"""Expressions in descriptions of families: conditions on a config, and defaults of its class.

They are a small part of Python: keys of the config, numbers and texts, ``and``, ``or``, ``not``,
``A if B else C``, comparisons, ``in``, ``+``, ``-``, ``*``, ``%``, ``/`` (which rounds down),
``KEY[...]``, and the functions below. ``layer`` is the number of a layer, from 0;
``get(KEY, VALUE)`` is the value of a key that the class has no default for, or another value.

Descriptions are not trusted: nothing else is evaluated, and no value can become large.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.base.tensors import Config

LONGEST = 300
"""Characters of an expression."""

LAYER = "layer"

Meaning = Callable[[Config, int | None], Any]
"""Computes a value from a config and the number of a layer."""

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": math.exp,
    "int": int,
    "window": lambda has: "sliding_attention" if has else "full_attention",
}

ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
}

COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}

SIGNS = (*ARITHMETIC, *COMPARISONS, ast.And, ast.Load, ast.Not, ast.Or, ast.USub)
"""Syntax nodes that are allowed in addition to those that ``_Evaluation`` visits."""

UNDECIDED = (ArithmeticError, LookupError, TypeError, ValueError)
"""Exceptions of an expression for a config with values of the wrong kind."""


@dataclass(frozen=True)
class Expression:
    """An expression that has been checked.

    Attributes:
        text: as written.
        names: names that it depends on: keys of the config, and ``layer``.
        compute: computes its value.
    """

    text: str
    names: frozenset[str]
    compute: Meaning = field(repr=False, compare=False)

    def __call__(self, config: Config, layer: int | None = None) -> Any:
        """Evaluate; raises one of ``UNDECIDED`` if the config's values do not fit."""
        return self.compute(config, layer)

    def holds(self, config: Config, layer: int | None = None) -> bool:
        """Whether it is true; see ``value``."""
        return bool(self.value(config, layer))

    def value(self, config: Config, layer: int | None = None) -> Any:
        """Evaluate for a config.

        Raises:
            InputError: the config has values of the wrong kind.
        """
        try:
            return self(config, layer)
        except UNDECIDED:
            raise InputError(
                f"config.json has {self.shown(config)}, for which {self.text!r}, in the "
                "description of its family, has no value; correct that"
            ) from None

    def shown(self, config: Config) -> str:
        """The keys that it depends on, with their values."""
        keys = sorted(self.names - {LAYER})
        return " and ".join(f"{key} {config.get(key)!r}" for key in keys)


_parsed = lru_cache(maxsize=1024)(partial(ast.parse, mode="eval"))  # families share most


def parse_expression(
    text: str, where: str, known: Collection[str], named: Mapping[str, Expression]
) -> Expression:
    """Parse an expression.

    Args:
        text: the expression.
        where: its name in messages.
        known: names that it may use: keys of the config, and ``layer``.
        named: other expressions that it may use by name.

    Raises:
        InputError: the text is not an expression, or uses an unknown name.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} characters")
        tree = _parsed(text).body
        names = _names(tree, {*known, *named})
        compute = _Compiler(named).visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{where} is {text[:LONGEST]!r}: {error}") from None
    used = named.keys() & names
    names = (names - used).union(*(named[name].names for name in used))
    return Expression(text, frozenset(names), compute)


def _names(tree: ast.expr, known: Collection[str]) -> set[str]:
    """The names in an expression; all except those in ``get`` must be known.

    Raises:
        ValueError: a name is unknown, or something is not part of the language.
    """
    names, free = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            key, *values = node.args
            if node.func.id == "get" and len(values) == 1 and isinstance(key, ast.Name):
                free.add(key.id)
            elif node.func.id not in FUNCTIONS or values:
                raise ValueError(f"{node.func.id} is no function of one value")
            free.add(node.func.id)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Call) or not (
            isinstance(node, SIGNS) or hasattr(_Compiler, f"visit_{type(node).__name__}")
        ):
            said = ast.unparse(node) or type(node).__name__  # an operator alone has no text
            raise ValueError(f"{said} is not part of the language of expressions")
    for name in names - free - {*known}:
        raise ValueError(f"{name!r} is unknown; {did_you_mean(name, sorted(known))}")
    return names - {"get", *FUNCTIONS}


class _Compiler(ast.NodeVisitor):
    """Turns syntax nodes into functions: an expression is evaluated for every layer."""

    def __init__(self, named: Mapping[str, Expression]) -> None:
        self._named = named

    def _applied(self, function: Callable[..., Any], *arguments: ast.expr) -> Meaning:
        every = [self.visit(argument) for argument in arguments]
        return lambda config, layer: function(*[meaning(config, layer) for meaning in every])

    def visit_Constant(self, node: ast.Constant) -> Meaning:
        return lambda config, layer: node.value

    def visit_Name(self, node: ast.Name) -> Meaning:
        if node.id == LAYER:
            return lambda config, layer: layer
        if node.id in self._named:
            return self._named[node.id].compute
        return lambda config, layer: config.get(node.id)

    def visit_List(self, node: ast.List) -> Meaning:
        return self._applied(lambda *values: [*values], *node.elts)

    def visit_Subscript(self, node: ast.Subscript) -> Meaning:
        return self._applied(operator.getitem, node.value, node.slice)

    def visit_IfExp(self, node: ast.IfExp) -> Meaning:
        test, body, other = (self.visit(part) for part in (node.test, node.body, node.orelse))
        return lambda config, layer: (body if test(config, layer) else other)(config, layer)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Meaning:
        negated = operator.not_ if isinstance(node.op, ast.Not) else operator.neg
        return self._applied(negated, node.operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> Meaning:
        ends, every = isinstance(node.op, ast.Or), [self.visit(operand) for operand in node.values]

        def compute(config: Config, layer: int | None) -> Any:
            value: Any = None
            for operand in every:
                value = operand(config, layer)
                if bool(value) is ends:
                    break
            return value

        return compute

    def visit_BinOp(self, node: ast.BinOp) -> Meaning:
        return self._applied(partial(_calculate, ARITHMETIC[type(node.op)]), node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> Meaning:
        signs = [COMPARISONS[type(sign)] for sign in node.ops]
        return self._applied(partial(_compare, signs), node.left, *node.comparators)

    def visit_Call(self, node: ast.Call) -> Meaning:
        assert isinstance(node.func, ast.Name)
        if node.func.id != "get":
            return self._applied(FUNCTIONS[node.func.id], *node.args)
        key, other = node.args[0], self.visit(node.args[1])
        assert isinstance(key, ast.Name)
        name = key.id
        return lambda config, layer: config[name] if name in config else other(config, layer)


def _calculate(operation: Callable[[Any, Any], Any], *numbers: Any) -> Any:
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("arithmetic of numbers was expected")
    return operation(*numbers)


def _compare(signs: Sequence[Callable[[Any, Any], bool]], *values: Any) -> bool:
    return all(sign(*pair) for sign, pair in zip(signs, pairwise(values), strict=True))
