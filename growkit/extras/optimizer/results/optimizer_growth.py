"""The growth of an optimizer's state, in the result of a growth."""

from growkit.results import Result


class OptimizerResult(Result):
    """The growth of an optimizer's state.

    Attributes:
        path: the file or folder of the source's state.
        format: format of the files, read and written alike.
        moments: the kinds of tensors that grow with the weights.
        step: the largest step count of any parameter; null if steps are not counted.
        groups: number of parameter groups; in a dry run, that of the source's state.
        bytes: size of the state's tensors; approximate in a dry run.
        reset: parameters that start without moments, with the reason; empty in a dry run.
        beside: other files of the training run next to the state, with the action for each.
        assumed: the assumed order of parameters, if the files do not name them; else empty.
    """

    path: str
    format: str
    moments: list[str]
    step: int | None
    groups: int
    bytes: int
    reset: dict[str, str]
    beside: dict[str, str]
    assumed: str


GROWTH = OptimizerResult
