"""Operations with odd options, drawn from what operations say of themselves.

Whatever stands in ``growkit.growth`` or ``growkit.conversions`` is drawn, with every option that it
has: on the command line, in recipes, and for models that are odd otherwise.
"""

from __future__ import annotations

from random import Random
from typing import Any

from growkit.base.errors import InputError
from growkit.planning.operation import Operation, Option, SizeOption, Switch
from growkit.recipe.recipe import PACKAGES, operations
from tests.fuzz.odd import HOSTILE, REAL, WHOLE, WORDS, change, near, odd, words, yaml_text
from tests.fuzz.places import Case, Place

WRITTEN = words(
    "1 2 3 4 8 16 0.1 0.5 1.0 10 30 x1 x2 x3 x4 x3/2 x1.5 x5/4 0,1 1,2,0 0,0 even end auto "
    "on text.txt 17 24 x16"
)
"""What a freely written value may be; an option takes those that it accepts."""
SIZES = words("x1 x2 x3 x4 x3/2 x1.5 x5/4 8 16 17 24 32")
ODD = [word for word in HOSTILE if "\0" not in word] + [*map(str, WHOLE), *map(str, REAL)]
ODD += WORDS + words("x1e3 x2.5.1 x/2 x2/0 x0/3 x1/0 1/2 x-1/2 ٣ x٢ ２ x２ Ⅷ 1,,2 ,1 1, -1,0 0,-1")
ODD += words("x1.0000000000000001 x99999/99998 100001 1_0 +2 x+2 0x2 1e1 2.0 true None off [1] {}")
DEFAULT = {"grow": "hypercloning"}
"""By the verb, what needs no name on the command line."""


def any_operation(random: Random) -> tuple[str, Operation]:
    """A verb and one of its operations; each as often as the others, conversions less."""
    verb = random.choices(list(PACKAGES), [2, 1])[0]
    return verb, random.choice(list(operations(verb).values()))


def sound_value(random: Random, option: Option) -> Any:
    """A value that an option takes; None if none was found."""
    if isinstance(option, Switch):
        return True
    known = option.values or (SIZES if isinstance(option, SizeOption) else WRITTEN)
    return random.choice([each for each in known if _takes(option, each)] or [None])


def _takes(option: Option, value: Any) -> bool:
    kinds = option.kinds
    try:
        option.read(value if str in kinds or not isinstance(value, str) else _typed(value, kinds))
    except (InputError, ValueError):
        return False
    return True


def _typed(text: str, kinds: tuple[type, ...]) -> Any:
    """A text as a value of a kind, as the command line reads it."""
    return float(text) if float in kinds else int(text)


def options(random: Random, operation: Operation, odd_ones: int) -> dict[str, Any]:
    """Options of an operation, so many of them odd."""
    often = random.choice([1, 2, 4]) / max(len(operation.options), 1)
    found = {
        each.name: value
        for each in operation.options
        if each.needed or random.random() < often
        for value in [sound_value(random, each)]
        if value is not None
    }
    for option in random.choices(operation.options, k=odd_ones) if operation.options else ():
        sound = found.get(option.name, random.choice(WRITTEN))
        found[option.name] = random.choice([odd(random), near(random, sound), random.choice(ODD)])
    return found


def line(random: Random, odd_ones: int = 0) -> tuple[str, ...]:
    """A command that makes something of a source."""
    verb, operation = any_operation(random)
    made = [verb, "source", "out"]
    if operation.name != DEFAULT.get(verb) or random.random() < 0.2:
        made += ["--method" if verb == "grow" else "--to", operation.name]
    for name, value in options(random, operation, odd_ones).items():
        made.append(f"--{name.replace('_', '-')}")
        if value is not True:
            made.append(_written(value))
    return tuple(made)


def _written(value: Any) -> str:
    """A value as an argument, which nothing ends but its end."""
    return str(value).replace("\0", "")[:100_000]


def steps(random: Random, places: dict[str, Place]) -> Case:
    """Odd options of any operation, of a model of any family."""
    place = random.choice(list(places))
    if random.random() < 0.5:
        dry = ("--dry-run", *(("--json",) if random.random() < 0.9 else ()))
        return Case(place, (*line(random, random.choice([0, 0, 1, 2])), *dry))
    recipe: dict[str, Any] = {"source": "source", "output": "out", "verify": False, "steps": []}
    for _ in range(random.choice([1, 1, 2, 3])):
        verb, operation = any_operation(random)
        chosen = options(random, operation, random.choice([0, 0, 1, 2]))
        recipe["steps"].append({verb: operation.name, **chosen})
    if random.random() < 0.2:
        recipe = change(random, recipe, [])
    files = {"recipe.yaml": yaml_text(random, recipe)}
    return Case(place, ("run", "recipe.yaml", "--dry-run", "--json"), files)
