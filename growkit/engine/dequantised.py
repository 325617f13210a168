"""Comparison of growkit's dequantised weights with those of transformers.

While transformers loads, it dequantises one parameter after the other. The same conversions run
here, one expert at a time if experts are stacked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from growkit.base.errors import plain, reason
from growkit.base.tensors import Weights
from growkit.checkpoint.dequantising import Dequantised
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import class_weights, converted, one_row, stacks
from growkit.engine.loader import Conversion, dequantisations, loading


@dataclass
class Agreement:
    """Names of a source's quantised tensors, by the outcome of the comparison.

    Attributes:
        same: tensors that transformers dequantises to the same bits.
        different: tensors that transformers dequantises to other bits.
        unchecked: tensors that transformers does not dequantise.
        why: why it does not.
    """

    same: set[str] = field(default_factory=set)
    different: set[str] = field(default_factory=set)
    unchecked: set[str] = field(default_factory=set)
    why: str = ""


def compare(source: Checkpoint) -> Agreement:
    """Compare the quantised tensors of a source, bit for bit."""
    if not isinstance(source, Dequantised):
        return Agreement(why="it is part of a larger model")
    found = Agreement()
    ours = class_weights(source)
    made = {name: dense for dense, parts in source.parts.items() for name in parts.names.values()}
    settings = source.format.transformers(source.settings)
    conversions: tuple[Conversion, ...] = ()
    if settings is None:
        found.why = f"transformers does not dequantise {source.format.title} while it loads"
    else:
        with _explain_errors(found):
            conversions = dequantisations(source, settings)
    for conversion in conversions:
        dense = {made[name] for name in conversion.sources if name in made}
        if dense and conversion.transform is not None:
            with _explain_errors(found):
                conversion.shapes = {conversion.name: ours.tensors[conversion.name].shape}
                same = all(_same(*each) for each in _pairs(source.stored, ours, conversion))
                (found.same if same else found.different).update(dense)
    read = {name for each in loading(source).conversions for name in each.sources}
    found.unchecked = (source.parts.keys() & read) - found.same - found.different
    return found


@contextmanager
def _explain_errors(found: Agreement) -> Iterator[None]:
    """Suppress errors of transformers and libraries, and keep the first as the reason."""
    try:
        yield
    except Exception as error:
        message = plain(reason(error)).partition("\n")[0]
        found.why = found.why or f"transformers fails with {message!r}"


def _pairs(
    stored: Weights, ours: Weights, conversion: Conversion
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a conversion's parameters, as transformers and as growkit makes them."""
    shapes = [stored.tensors[name].shape for name in conversion.sources]
    apart = stacks(conversion)
    experts = conversion.shapes[conversion.name][0]
    if not apart and not all(len(shape) > 2 and shape[0] == experts for shape in shapes):
        rows: list[slice] = [slice(None)]
    else:
        rows = [slice(place, place + 1) for place in range(experts)]
    for each in rows:
        part = one_row(conversion, each.start) if apart else conversion
        where = () if apart or each.start is None else (each,)
        with torch._C.DisableTorchFunction():  # stored dtypes, also in strict float64
            read = {
                pattern: [stored.read(name, *where) for name in names]
                for pattern, names in part.tensors.items()
            }
            made = converted(part, read)
            if conversion.name not in made:
                raise ValueError(f"it does not make {conversion.name}")
            for name, found in made.items():
                yield found, ours.read(name, each)


def _same(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.dtype == ours.dtype and torch.equal(theirs, ours)
