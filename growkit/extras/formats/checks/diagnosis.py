"""What went wrong in a conversion: which mistake explains the weights that are not the source's.

Each mistake that converters make is repeated on the tensor of the source. It explains the tensor of
the target if it gives all of its numbers, bit for bit. Nothing is reported of weights that agree.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor

from growkit.base.axes import ORDERS
from growkit.base.errors import InputError
from growkit.base.names import listed
from growkit.base.tensors import TensorInfo, same_numbers, widened
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.class_weights import class_weights
from growkit.extras.formats.nearness import Nearness, measure_nearness
from growkit.extras.formats.relations import (
    SKETCH,
    pieces,
    rank_of_change,
    relation,
    removes_direction,
    shape_of,
)
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.model import Derived, Model
from growkit.proof.check import Check
from growkit.proof.config_comparison import experts_by_config
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.proof.weights import is_converted
from growkit.results.proof_result import Finding, Section, counted

NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")
"""The number of a layer, or of an expert, in the name of a tensor."""

PARAMETER = re.compile(r"\w+(\.(weight|bias))?$")
"""The name of a parameter, with that of its module if it is only a weight or a bias."""

STEPS = re.compile(r"holds the source's layer that is (\d+) (before|after)")
"""What is said of a tensor that is that of another layer."""

MAX_TOLD = 6
"""Largest number of explanations in a sentence."""

SKETCHED, LIKELY = 1024, 2
"""Numbers of the first row by which exchanged tensors are looked for, and how many are tried."""

QKV = ("q_proj", "k_proj", "v_proj")

Rule = Callable[[Tensor, Mapping[str, int]], Tensor | None]
"""Repeats a mistake on a source's tensor, given the sizes of axes; None if it does not apply."""


class Diagnosis(Section):
    """Explanations of weights that are not the source's.

    Attributes:
        explanations: each mistake, with the tensors that it explains, in full or but for noise.
        unexplained: tensors of the target that no mistake explains in full.
    """

    explanations: list[str]
    unexplained: list[str]


def diagnose(pair: Pair, function: Function) -> Section | None:
    """Explain the tensors of a target of unknown origin that does not compute the same.

    Another program's format holds the weights of the source, whatever the logits show.
    """
    if not pair.lineage.unknown or (function.kept and not is_converted(pair.after)) or pair.adapter:
        return None
    section = explain_weights(pair.before, pair.after)
    if function.kept:
        return section if section and section.explanations else None
    return section or explain_sizes(pair.before, pair.after)


CHECK = Check(diagnose)


def explain_weights(before: Checkpoint, after: Checkpoint) -> Diagnosis | None:
    """Explain the tensors that differ in two models, or say how near they are; None if none does.

    Of two vocabularies, the tokens that both have are compared. It is also None if other tensors
    have other shapes.
    """
    was, now = map(Unstacked, _alike(before, after))
    one, other = Shortened(was, now), Shortened(now, was)
    names = [name for name in was.tensors if name in now.tensors]
    if any(shape_of(one, name) != shape_of(other, name) for name in names):
        return None
    with stored_dtypes():  # strict float64 must not apply
        wrong = [name for name in names if not _same(one, other, name)]
        more = [name for name in now.tensors if name not in was.tensors]
        explained = _explain(one, other, [*wrong, *more], _sizes(after))
        unexplained = [name for name in wrong if name not in explained]
        near = _describe(one, other, unexplained, _sizes(after))
    phrases = explained | {name: of.told for name, of in near.items()}
    moved, told = _moved_layers(phrases, was, now)
    rest = _rest(was, now, told.union(phrases))
    if not wrong and not moved and not rest:
        return None
    clauses = moved + _clauses({n: of for n, of in phrases.items() if n not in told}, names) + rest
    if untold := [name for name in unexplained if name not in near]:
        clauses.append(f"no known mistake explains {listed(untold)}")
    place = (
        wrong[0] if wrong else min(was.tensors.keys() ^ now.tensors.keys(), default="vocab_size")
    )
    by_mistake = {n: of for n, of in phrases.items() if n in explained or near[n].mistake}
    return _diagnosis("; ".join(clauses), place, sentences_on(by_mistake, names), unexplained)


def _clauses(phrases: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """What is said of tensors, in few clauses: that of most tensors does not list them."""
    usual, count = (Counter(phrases.values()).most_common(1) or [("", 0)])[0]
    usually = [name for name in phrases if phrases[name] == usual]
    if 2 * count < len(phrases) or len({*map(_component, usually)}) <= MAX_TOLD:
        usual, count = "", 0
    rare = {name: phrase for name, phrase in phrases.items() if phrase != usual}
    clauses = sentences_on(rare, names)
    if len(clauses) > MAX_TOLD:
        clauses[MAX_TOLD:] = [f"{len(clauses) - MAX_TOLD} more"]
    if count == len(names):
        clauses.append(f"every tensor {usual}")
    elif count:
        clauses.append(f"each of the {'other ' * bool(rare)}{count} tensors that differ {usual}")
    return clauses


class Shortened(Derived):
    """A model with only the tokens that another one has as well."""

    def __init__(self, source: Model, other: Model) -> None:
        super().__init__(source)
        self.in_blocks = source.in_blocks
        sizes = [of.config.get("vocab_size") for of in (source, other)]
        self._rows: dict[str, int] = {}
        for name, info in source.tensors.items():
            theirs = shape_of(other, name)
            if [info.shape[:1], theirs[:1]] == [(size,) for size in sizes] and sizes[0] != sizes[1]:
                self._rows[name] = min(info.shape[0], theirs[0])
        self.tensors = {**source.tensors} | {
            name: TensorInfo((rows, *source.tensors[name].shape[1:]), source.tensors[name].dtype)
            for name, rows in self._rows.items()
        }

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        if name in self._rows:
            rows = (where[0] if where else None) or slice(None)
            where = slice(*rows.indices(self._rows[name])[:2]), *where[1:]
        return super().read(name, *where)


class Unstacked(Derived):
    """A model with one tensor for each expert, also where the source stacks them."""

    def __init__(self, source: Model) -> None:
        super().__init__(source)
        counts = {source.config.get(key) for key in experts_by_config(source.config)[1]}
        inside = {name.rpartition(".")[0] for name, of in source.tensors.items() if of.shape[2:]}
        self._stacked = {
            PARAMETER.sub(rf"{expert}.\g<0>", name): (name, expert)
            for name, info in source.tensors.items()
            if info.shape[1:] and info.shape[0] in counts and name.rpartition(".")[0] in inside
            for expert in range(info.shape[0])
        }
        stacked = {name for name, _ in self._stacked.values()}
        self.tensors = {name: of for name, of in source.tensors.items() if name not in stacked}
        for name, (stored, _) in self._stacked.items():
            info = source.tensors[stored]
            self.tensors[name] = TensorInfo(info.shape[1:], info.dtype)
        in_files = ((name, self._stacked.get(name, (name, 0))[0]) for name in self.tensors)
        self.in_blocks = {name for name, stored in in_files if stored in source.in_blocks}

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        if name not in self._stacked:
            return super().read(name, *where)
        stored, expert = self._stacked[name]
        return super().read(stored, slice(expert, expert + 1), *where)[0]

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        stored, expert = self._stacked.get(name, (name, None))
        return max(super().cuts(stored) - (expert is not None), 0)


def _rest(was: Model, now: Model, told: set[str]) -> list[str]:
    """Sentences on what one of two models has beyond the other, but for tensors named already."""
    sizes = [model.config.get("vocab_size") for model in (was, now)]
    rest = [f"the vocabulary has {sizes[1]} tokens in place of {sizes[0]}"] * (sizes[0] != sizes[1])
    lost, more = was.tensors.keys() - now.tensors.keys(), now.tensors.keys() - was.tensors.keys()
    for names, what in ((lost - told, "lacks {}"), (more - told, "has {} more")):
        if names:
            number = what.format(counted(len(names), "tensor"))
            rest.append(f"the target {number} ({listed(sorted(names), 2)})")
    return rest


def _moved_layers(phrases: Mapping[str, str], was: Model, now: Model) -> tuple[list[str], set[str]]:
    """Clauses on layers that are other layers of the source, and the tensors in both.

    Some tensors of a layer may be the same in both.
    """
    before, after = _by_layer(was), _by_layer(now)
    moved: defaultdict[str, dict[int, int]] = defaultdict(dict)
    told = set[str]()
    for (stem, number), names in after.items():
        inside = names & phrases.keys()
        steps = {STEPS.match(phrases[name]) for name in inside}
        if (
            2 * len(inside) > len(names)
            and None not in steps
            and len({of[0] for of in steps if of}) == 1
        ):
            step, word = next(of.groups() for of in steps if of)
            moved[stem][number] = number + int(step) * (-1 if word == "before" else 1)
            told |= inside | before[stem, moved[stem][number]]
    clauses = []
    for stem, layers in moved.items():
        here, there = (", ".join(map(str, numbers)) for numbers in (layers, layers.values()))
        clauses.append(f"{stem}{here} {'are' if len(layers) > 1 else 'is'} the source's {there}")
        kept = {number for of, number in after if of == stem} - layers.keys()
        for number in sorted({n for of, n in before if of == stem} - kept - {*layers.values()}):
            clauses.append(f"the source's {stem}{number} is missing")
            told |= before[stem, number]
    return clauses, told


def _by_layer(model: Model) -> dict[tuple[str, int], set[str]]:
    """The names of tensors by the stem and the number of their layer."""
    layers: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for name in model.tensors:
        if place := NUMBER.search(name):
            layers[name[: place.start()], int(place[0])].add(name)
    return layers


def sentences_on(phrases: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Sentences on tensors, one for all layers alike.

    Args:
        phrases: what is said of a tensor, by its name.
        names: the names of all tensors of which something could be said.
    """
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, phrase in phrases.items():
        groups[_component(name), phrase].append(name)
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (component, phrase), wrong in groups.items():
        alike[_layers(component, wrong, names), phrase].append(component.rpartition("*.")[2])
    return [
        f"{'each of ' * (len(of) > 1)}{listed(of)}{layers} {phrase}"
        for (layers, phrase), of in sorted(alike.items(), key=lambda of: of[0][1] in ROUNDED)
    ]


def _diagnosis(
    sentence: str, place: str, explanations: list[str], unexplained: Sequence[str] = ()
) -> Diagnosis:
    finding = Finding(name="diagnosis", kept=None, sentence=sentence, place=place, in_reason=True)
    return Diagnosis(
        findings=[finding], notes=[], explanations=explanations, unexplained=[*unexplained]
    )


def explain_sizes(before: Checkpoint, after: Checkpoint) -> Diagnosis | None:
    """Explain equal weights with other sizes in the config, such as heads of another width.

    None if the weights differ, or if the sizes are the same.
    """
    if not _sizes(before) or not _sizes(after):
        return None
    was, now = (model.family.complete(model.config) for model in (before, after))
    changed = sorted(key for key in before.family.size_keys if was.get(key) != now.get(key))
    one, other = _alike(before, after)
    if not changed or one.tensors.keys() != other.tensors.keys():
        return None
    with stored_dtypes():
        if not all(_same(one, other, name) for name in one.tensors):
            return None
    keys = ", ".join(f"{key} {now.get(key)} in place of {was.get(key)}" for key in changed)
    sentence = f"all weights agree, but the config has {keys}"
    return _diagnosis(sentence, changed[0], [sentence])


def _alike(before: Model, after: Model) -> tuple[Model, Model]:
    """Both models with the same names: those of the files, or of the classes."""
    if before.tensors.keys() == after.tensors.keys():
        return before, after
    return class_weights(before), class_weights(after)


def _sizes(model: Model) -> Mapping[str, int]:
    """The sizes of the axes of a model; empty if no family describes it."""
    with suppress(InputError):
        return model.family.sizes(model.config)
    return {}


def _same(before: Model, after: Model, name: str, other: str = "") -> bool:
    """Whether a tensor of the target is that of the source, or another one."""
    other = other or name
    if shape_of(before, other) != shape_of(after, name):
        return False
    return all(
        same_numbers(before.read(other, *where), after.read(name, *where))
        for where in pieces(after, name)
    )


def _component(name: str) -> str:
    """The name of a tensor without numbers of layers and experts."""
    return NUMBER.sub("*", name)


def _layers(component: str, names: Sequence[str], every: Collection[str]) -> str:
    """The layers and experts whose tensors a mistake explains; empty outside of layers."""
    if "*" not in component:
        return ""
    alike = [name for name in every if _component(name) == component]
    if len(names) == len(alike):
        return " of all layers"
    told = ""
    for what, place in (("layer", 0), ("expert", 1)):
        numbers, others = (
            {int(found[place]) for name in of if len(found := NUMBER.findall(name)) > place}
            for of in (names, alike)
        )
        if numbers and (what == "layer" or numbers != others):
            listed_numbers = ", ".join(map(str, sorted(numbers)))
            told += f"{',' if told else ' of'} {what}{'s' * (len(numbers) > 1)} {listed_numbers}"
    return told


# Mistakes


def _describe(
    before: Model, after: Model, wrong: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, Nearness]:
    """How each tensor that no mistake explains is related to the source's."""
    firsts: dict[tuple[int, ...], dict[str, Tensor]] = {}
    if wrong:
        for name in before.tensors:
            if len(shape := shape_of(before, name)) > 1:
                firsts.setdefault(shape, {})[name] = _first_row(before, name)
    near = dict[str, Nearness]()
    for name in wrong:
        others = _likely(firsts.get(shape_of(after, name), {}), after, name)

        def forms(
            where: slice, name: str = name, others: Sequence[str] = others
        ) -> Iterator[tuple[str, Tensor]]:
            for which, phrase in product((name, *others), ("", *ORDERED)):
                tensor = _repeated(before, which, (phrase,) if phrase else (), sizes, where)
                if tensor is not None:
                    swapped = [] if which == name else [_relation(name, which)]
                    yield ", and ".join([*swapped, phrase] if phrase else swapped), tensor

        if nearness := measure_nearness(before, after, name, forms, sizes.get("head_dim") or 1):
            near[name] = nearness
    largest = dict[str, float]()
    for phrase, number, _ in near.values():
        largest[phrase] = max(number, largest.get(phrase, 0.0))
    return {name: of._replace(number=largest[of.phrase]) for name, of in near.items()}


def _first_row(model: Model, name: str) -> Tensor:
    """The direction of the first numbers of a tensor."""
    row = widened(model.read(name, slice(0, 1)).flatten()[:SKETCHED]).double()
    direction: Tensor = row / row.norm().clamp(min=1e-300)
    return direction


def _likely(firsts: Mapping[str, Tensor], after: Model, name: str) -> list[str]:
    """Other tensors of the source with which one may have been exchanged, by their first rows."""
    if len(shape_of(after, name)) < 2:
        return []
    row = _first_row(after, name)
    alike = {other: abs(float(first @ row)) for other, first in firsts.items() if other != name}
    return sorted(alike, key=lambda other: -alike[other])[:LIKELY]


def _explain(
    before: Model, after: Model, wrong: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, str]:
    """The phrase that explains each tensor, for those that a mistake explains."""
    sketches: defaultdict[tuple[float, ...], list[str]] = defaultdict(list)
    for name in before.tensors:
        sketch = _sketch(before, name)
        for values in {sketch, *(_rounded_to(dtype, sketch) for dtype in ROUNDED.values())}:
            sketches[values].append(name)
    explained, likely, counts = dict[str, str](), dict[str, str](), Counter[str]()
    # Small tensors may have numbers that several mistakes explain, so large ones come first.
    for name in sorted(wrong, key=lambda name: -after.tensors[name].elements):
        component = _component(name)
        others = [other for other in sketches[_sketch(after, name)] if other != name]
        rules = sorted(RULES, key=lambda phrase: (phrase != likely.get(component), -counts[phrase]))
        trials = [
            *((other, ()) for other in others),
            *((name, (phrase,)) for phrase in rules),
            *product(others, [(phrase,) for phrase in ROUNDED]),
            *product(_alternatives(name, before)[1:], [(phrase,) for phrase in ROTARY]),
            *product(
                _alternatives(name, before),
                product([phrase for phrase in rules if phrase not in (*ROUNDED, *FINER)], ROUNDED),
            ),
        ]
        for which, phrases in trials:
            if _repeats(before, after, which, name, phrases, sizes):
                swapped = [] if which == name else [_relation(name, which)]
                explained[name] = likely[component] = ", and ".join([*swapped, *phrases])
                counts.update(phrases[:1])
                break
    explained |= dict(_mixed(before, after, wrong, explained, sizes))
    rest = [name for name in wrong if name in before.tensors and name not in explained]
    explained |= {name: how for name in rest if (how := relation(before, after, name, sizes))}
    explained |= _with_low_rank(before, after, [name for name in rest if name not in explained])
    return {name: explained[name] for name in wrong if name in explained}


def _repeats(
    before: Model,
    after: Model,
    which: str,
    name: str,
    phrases: Sequence[str],
    sizes: Mapping[str, int],
) -> bool:
    """Whether mistakes make a tensor of the target from one of the source, part by part."""
    if shape_of(before, which)[::-1] not in (shape_of(after, name), shape_of(after, name)[::-1]):
        return False
    for where in pieces(after, name, sizes.get("head_dim") or 1):
        now = after.read(name, *where)
        if FINER.keys() & {*phrases}:  # the source has what the target rounds to
            repeated, now = (
                _repeated(after, name, phrases, sizes, *where),
                before.read(which, *where),
            )
        else:
            repeated = _repeated(before, which, phrases, sizes, *where)
        if repeated is None or not same_numbers(repeated.to(now.dtype), now):
            return False
    return True


def _repeated(
    model: Model, name: str, phrases: Sequence[str], sizes: Mapping[str, int], *where: slice
) -> Tensor | None:
    """What mistakes make of a tensor, in some rows; None if one does not apply."""
    moved = next((PARTS[phrase] for phrase in phrases if phrase in PARTS), None)
    repeated = moved(model, name, *where) if moved else model.read(name, *where)
    for phrase in phrases:
        repeated = None if repeated is None else RULES[phrase](repeated, sizes)
    return repeated


def _alternatives(name: str, model: Model) -> list[str]:
    """A tensor, and the projections of the same attention with which it may be exchanged."""
    kind = next((kind for kind in QKV if kind in name), "")
    alike = [name.replace(kind, other) for other in QKV if kind and other != kind]
    return [name, *(other for other in alike if shape_of(model, other) == shape_of(model, name))]


def _sketch(model: Model, name: str) -> tuple[float, ...]:
    """The first elements of a tensor."""
    first = model.read(name, slice(0, 1)) if shape_of(model, name)[1:] else model.read(name)
    return tuple(widened(first.flatten()[:SKETCH]).double().tolist())


def _rounded_to(dtype: torch.dtype, numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(numbers, dtype=torch.float64).to(dtype).double().tolist())


def _relation(name: str, other: str) -> str:
    """How the tensor that a name holds is related to the one that it should hold."""
    own, theirs = ([int(number) for number in NUMBER.findall(text)] for text in (name, other))
    if _component(name) != _component(other):
        place = "" if own == theirs else f" of {other}"
        return f"holds {_component(other).rpartition('*.')[2]}{place} of the source"
    if own[:1] == theirs[:1]:
        return "holds another expert of the source"
    steps = theirs[0] - own[0]
    return f"holds the source's layer that is {abs(steps)} {'before' if steps < 0 else 'after'}"


def _pairs(tensor: Tensor, sizes: Mapping[str, int], first: int) -> Tensor | None:
    """Reorder the rows of every head: pairs of ``first`` rows become halves, or the reverse."""
    width = sizes.get("head_dim", 0)
    if width < 4 or width % 2 or len(tensor) % width:
        return None
    heads = tensor.unflatten(0, (-1, 2, width // 2) if first == 2 else (-1, width // 2, 2))
    moved: Tensor = heads.transpose(1, 2).reshape(tensor.shape)
    return moved


def _rounded(dtype: torch.dtype) -> Rule:
    return lambda tensor, sizes: tensor.to(dtype).to(torch.float64)


ROUNDED = {
    f"is rounded to {name}": getattr(torch, name)
    for name in ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16")  # narrow ones first
}
FINER: dict[str, Rule] = {
    f"{phrase} in the source": _rounded(dtype) for phrase, dtype in ROUNDED.items()
}
"""Mistakes of a source, from which the target was not made."""

ROTARY: dict[str, Rule] = {
    "has the rows of rotary pairs next to each other, where the class has halves": (
        lambda tensor, sizes: _pairs(tensor, sizes, 2)
    ),
    "has the rows of rotary pairs moved from neighbours to halves, where they were halves": (
        lambda tensor, sizes: _pairs(tensor, sizes, 0)
    ),
}
RULES: dict[str, Rule] = {
    **ROTARY,
    "is transposed": lambda tensor, sizes: tensor.T,
    "has 1 added": lambda tensor, sizes: tensor.double() + 1,
    "has 1 subtracted": lambda tensor, sizes: tensor.double() - 1,
    "has the other sign": lambda tensor, sizes: -tensor,
    "is zero": lambda tensor, sizes: torch.zeros_like(tensor),
    "has its halves exchanged": lambda tensor, sizes: tensor,
    **{phrase: _rounded(dtype) for phrase, dtype in ROUNDED.items()},
    "is rounded to bfloat16, and then to float16": (
        lambda tensor, sizes: tensor.to(torch.bfloat16).to(torch.float16).double()
    ),
    "is rounded to float16, and then to bfloat16": (
        lambda tensor, sizes: tensor.to(torch.float16).to(torch.bfloat16).double()
    ),
    **FINER,
}
"""By the phrase that says what is wrong with a tensor."""

ORDERED = (*ROTARY, "is transposed", "has its halves exchanged")
"""Mistakes that leave every number as it is, and may be seen through noise."""


def _columns(model: Model, name: str, *where: slice) -> Tensor | None:
    """The columns of a square matrix that become these rows."""
    shape = shape_of(model, name)
    square = len(shape) == 2 and shape[0] == shape[1]
    return model.read(name, slice(None), *where) if square else None


def _other_half(model: Model, name: str, *where: slice) -> Tensor | None:
    """The rows that are as far from the other half's beginning as these from their own's."""
    length = (*shape_of(model, name), 1)[0]
    if length % 2:
        return None
    rows, half = where[0], length // 2
    ahead = slice(min(rows.start + half, length), min(rows.stop + half, length))
    back = slice(max(rows.start - half, 0), max(rows.stop - half, 0))
    pieces = [model.read(name, piece) for piece in (ahead, back) if piece.start < piece.stop]
    return torch.cat(pieces)


PARTS: dict[str, Callable[..., Tensor | None]] = {
    "is transposed": _columns,
    "has its halves exchanged": _other_half,
}
"""Reads the part of the source's tensor that a mistake moves to these rows, if not the same one."""


def _with_low_rank(before: Model, after: Model, wrong: Sequence[str]) -> dict[str, str]:
    """Matrices to which matrices of low rank were added."""
    ranks = {name: rank_of_change(before, after, name) for name in wrong}
    largest = max(ranks.values(), default=0)
    added = f"is the source's plus a matrix of rank {largest} or less, as after a merged LoRA "
    return {
        name: "lacks one direction of the source's, as after abliteration"
        if rank == 1 and removes_direction(before, after, name)
        else f"{added}(--adapter FOLDER proves the merge)"
        for name, rank in ranks.items()
        if rank
    }


def _mixed(
    before: Model,
    after: Model,
    wrong: Sequence[str],
    explained: Mapping[str, str],
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """Queries, keys and values that were cut out of a fused matrix in the wrong order."""
    if not {"heads", "kv_heads", "head_dim"} <= sizes.keys():
        return
    order = torch.tensor(ORDERS["with_keys_and_values"]("heads", "kv_heads", "head_dim")(sizes))
    for name in wrong:
        three = [name.replace(QKV[0], kind) for kind in QKV]
        if QKV[0] not in name or not {*three} <= {*before.tensors} or explained.keys() & {*three}:
            continue
        was, now = (torch.cat([model.read(one) for one in three]) for model in (before, after))
        if len(was) != len(order):
            continue
        if same_numbers(was[order], now):
            phrase = "is cut from queries, keys and values in the order of groups"
        elif same_numbers(was, now[order]):
            phrase = "is cut as if queries, keys and values were in the order of groups"
        else:
            continue
        yield from ((one, phrase) for one in three if one in wrong)
