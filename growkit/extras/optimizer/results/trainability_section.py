"""The section on the gradients of a target."""

from growkit.results import Result
from growkit.results.proof_result import Section


class CopyDistance(Result):
    """Distance between the gradients of copies.

    Attributes:
        tensor: the tensor that holds the copies.
        copies: number of copies of every row.
        relative_distance: distance of the two closest copies, relative to their size; the median
            over rows.
        effective_rank_gain: effective rank of the gradient minus that of equal copies; null for
            large matrices.
    """

    tensor: str
    copies: int
    relative_distance: float
    effective_rank_gain: float | None


class TrainabilitySection(Section):
    """Whether the target, and in particular its copies, can learn, by one backward pass.

    Unless requested, it is null if nothing was copied, or if that is unknown.

    Attributes:
        trainable: whether every parameter gets a gradient, and no two copies the same gradient;
            null if gradients cannot be computed.
        copied: number of rows (neurons, heads' rows, embedding columns) that have copies.
        identical_gradients: number of copied rows with two copies that get the same gradient and
            would stay equal for ever.
        without_gradient: number of copied rows that get no gradient on this text.
        first_identical: the first tensor with identical gradients; null if there is none.
        silent_parameters: the first few names of parameters whose gradient is zero, or that hold
            zeros that cannot be learned.
        idle_layers: number of layers that pass their input on unchanged. Their output matrices get
            a gradient at once; their other parameters are judged after a first step.
        symmetry: distances between the gradients of copies, by tensor.
    """

    trainable: bool | None
    copied: int
    identical_gradients: int
    without_gradient: int
    first_identical: str | None
    silent_parameters: list[str]
    idle_layers: int
    symmetry: list[CopyDistance]


SECTION = TrainabilitySection
