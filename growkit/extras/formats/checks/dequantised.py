"""Comparison of growkit's dequantised weights with those of transformers.

While transformers loads, it dequantises one parameter after the other. The same conversions run
here, one expert at a time if experts are stacked.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from growkit.base.errors import plain, reason
from growkit.base.tensors import Weights
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.class_weights import class_weights, converted, one_row, stacks
from growkit.engine.loader import Conversion, dequantisations, loading
from growkit.extras.formats.dequantising import Dequantised
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section


def check_dequantised(pair: Pair, function: Function) -> Section | None:
    """Compare the quantised tensors of a source, bit for bit."""
    source = pair.stored
    if not source.quantised:
        return None
    equal, why, unchecked = dict[str, bool](), "it is part of a larger model", set[str]()
    if isinstance(source, Dequantised):
        equal, why = _compare(source)
        read = {name for conversion in loading(source).conversions for name in conversion.sources}
        unchecked = (source.parts.keys() & read) - equal.keys()
    kept: bool | None = bool(equal) or None
    first: str | None = None
    sentence = "transformers dequantises the source to the same bits"
    if different := [name for name, same in equal.items() if not same]:
        kept, first = False, min(different)
        sentence = f"transformers dequantises {first} of the source to other numbers than growkit"
    elif not equal:
        sentence = f"only growkit dequantised the source, without a comparison, since {why}"
    elif unchecked:
        rest = f"{len(unchecked)} tensors (first {min(unchecked)})"
        sentence += f", but for {rest} there was no comparison, since {why}"
    finding = Finding(name="dequantised", kept=kept, sentence=sentence, place=first)
    finding.in_reason = kept is not False
    if kept is False:
        finding.advice = "dequantise the source with the library that quantised it, and grow that"
    return Section(findings=[finding], notes=[])


CHECK = Check(check_dequantised)


def _compare(source: Dequantised) -> tuple[dict[str, bool], str]:
    """Whether transformers makes the same bits of each tensor, and why some were not compared."""
    settings = source.scheme.transformers(source.settings)
    if settings is None:
        return {}, f"transformers does not dequantise {source.scheme.title} while it loads"
    ours, equal, errors = class_weights(source), dict[str, bool](), list[str]()
    dense_of = {
        name: dense for dense, parts in source.parts.items() for name in parts.names.values()
    }
    conversions: tuple[Conversion, ...] = ()
    with _explain_errors(errors):
        conversions = dequantisations(source, settings)
    for conversion in conversions:
        dense = {dense_of[name] for name in conversion.sources if name in dense_of}
        misread = [source.scheme.misread(source.parts[n], source.settings) for n in sorted(dense)]
        if any(misread):
            errors.extend(filter(None, misread))
        elif dense and conversion.transform is not None:
            with _explain_errors(errors):
                conversion.shapes = {conversion.name: ours.tensors[conversion.name].shape}
                same = all(_same(*pair) for pair in _pairs(source.stored, ours, conversion))
                equal |= {name: same and equal.get(name, True) for name in dense}
    return equal, "".join(errors[:1])


@contextmanager
def _explain_errors(errors: list[str]) -> Iterator[None]:
    """Collect errors of transformers and libraries instead of raising them."""
    try:
        yield
    except Exception as error:
        message = plain(reason(error)).partition("\n")[0]
        errors.append(f"transformers fails with {message!r}")


def _pairs(
    stored: Weights, ours: Weights, conversion: Conversion
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a conversion's parameters, as transformers and as growkit makes them."""
    shapes = [stored.tensors[name].shape for name in conversion.sources]
    stacked = stacks(conversion)
    experts = conversion.shapes[conversion.name][0]
    if not stacked and not all(len(shape) > 2 and shape[0] == experts for shape in shapes):
        rows: list[slice] = [slice(None)]
    else:
        rows = [slice(place, place + 1) for place in range(experts)]
    for row in rows:
        part = one_row(conversion, row.start) if stacked else conversion
        where = () if stacked or row.start is None else (row,)
        with stored_dtypes():  # stored dtypes, also in strict float64
            read = {
                pattern: [stored.read(name, *where) for name in names]
                for pattern, names in part.tensors.items()
            }
            parameters = converted(part, read)
            if conversion.name not in parameters:
                raise ValueError(f"it does not make {conversion.name}")
            for name, theirs in parameters.items():
                yield theirs, ours.read(name, row)


def _same(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.dtype == ours.dtype and torch.equal(theirs, ours)
