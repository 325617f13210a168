"""What the law of updates says of an output, as results and manifests hold it."""

from __future__ import annotations

from growkit.results.result import Result


class UpdateGroup(Result):
    """Tensors that an optimizer treats alike.

    Attributes:
        tensors: their names in the files; a ``*`` stands for any number.
        lr: what the source's learning rate is multiplied by.
        weight_decay: what decoupled weight decay is multiplied by.
        eps: what AdamW's eps is multiplied by.
        n_in: into how many parts their weights are split; of unequal parts, on average.
        n_out: among how many copies their gradients are shared, in ascending order, where that is
            not the same for all rows.
        new: whether the source has nothing that trains like them.
    """

    tensors: list[str]
    lr: float
    weight_decay: float
    eps: float
    n_in: float
    n_out: list[float]
    new: bool


class Updates(Result):
    """How the output is to be trained, so that it learns as its source would.

    Attributes:
        exact: whether that is the source's training but for rounding, as long as what is new stays
            as it is.
        why: what keeps it from that, a phrase for each.
        single_rate: what the source's learning rate is multiplied by, if it is to be one for all
            tensors, so that a step is as long as with these factors.
        groups: the factors, of all tensors.
    """

    exact: bool
    why: list[str]
    single_rate: float
    groups: list[UpdateGroup]
