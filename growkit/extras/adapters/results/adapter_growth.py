"""The growth of an adapter, in the result of a growth."""

from growkit.results import Result
from growkit.results.growth_result import Updates


class AdapterResult(Result):
    """The growth of an adapter of PEFT.

    Attributes:
        path: the adapter of the source.
        method: PEFT's name of the method.
        tensors: number of written tensors.
        source_parameters: number of parameters of the source's adapter.
        parameters: number of parameters of the grown adapter.
        bytes: size of the grown adapter's tensors.
        updates: training factors of the grown adapter's tensors, by their names in the file.
    """

    path: str
    method: str
    tensors: int
    source_parameters: int
    parameters: int
    bytes: int
    updates: Updates


GROWTH = AdapterResult
