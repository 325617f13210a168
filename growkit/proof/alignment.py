"""Which layers of two models of different depth belong together.

A new layer that hands on what it is given computes nothing: behind it stands what stood before it.
So the layers of both that do compute something are the same, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from growkit.engine.layerwise import Stage

Pair = tuple[Stage | None, Stage | None, bool]
"""A stage of the source and one of the target, and whether they should hand on the same."""


def beside(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None] | None
) -> Iterator[Pair]:
    """Both models, stage by stage; all stages of both come, some of the source's more than once.

    Args:
        before: the embedding and the layers of the source.
        after: those of the target.
        layers: for each layer of the target the number of the source's that it computes, or None
            for one that hands on what it is given; None as a whole if that is not known.
    """
    yield from _found(before, after) if layers is None else _known(before, after, layers)


def _known(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None]
) -> Iterator[Pair]:
    one: Stage | None = next(before)
    yield one, next(after), True
    done, same = 0, True  # of the source's layers
    for layer in layers:
        same = same and layer in (None, done)
        if layer is not None or not same:
            one, done = next(before, None), done + 1
        yield one, next(after, None), same
    for left in before:
        yield left, None, False


def _found(before: Iterator[Stage], after: Iterator[Stage]) -> Iterator[Pair]:
    one: Stage | None = next(before)
    other = next(after)
    yield one, other, True
    given = other.after[0]
    for other in after:
        other.let_go()  # the source's layer needs the room
        if not other.after[0].equal(given):
            handed = one.after[0] if one else given
            one = None
            for left in before:
                if not left.after[0].equal(handed):
                    one = left
                    break
                yield left, None, False
        given = other.after[0]
        yield one, other, True
    for left in before:
        yield left, None, False
