"""The section on the series of a causal integral."""

from growkit.results import Result
from growkit.results.proof_result import Section


class SeriesError(Result):
    """How far the series of a causal integral is from the exact one in a layer, on the text.

    Attributes:
        module: name of the layer in the target.
        error: largest difference of an element of the layer's attention, relative to the root mean
            square of its row, in float32.
        rounding: the same of rounding the exact output once to the dtype of the weights; null if
            that rounds no float32.
        of_bound: largest difference of an element of a head, relative to its bound from the squared
            means of the columns that the series leaves out, in float64; above 1 only by a fault.
    """

    module: str
    error: float | None
    rounding: float | None
    of_bound: float | None


class SeriesSection(Section):
    """The series of a causal integral; if the target's integral is not exact.

    Attributes:
        layers: the error of the series in every layer.
    """

    layers: list[SeriesError]


SECTION = SeriesSection
