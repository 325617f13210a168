"""The plan of a recipe, in Python and as ``--json``."""

from growkit.results.growth_result import Costs, Described


class LargePlan(Described, Costs):
    """Estimated costs of a recipe, as ``growkit plan`` prints them.

    Attributes:
        bandwidth: limit of reading and writing, in bytes per second; null for no limit.
        read: bytes of the source's tensors.
        files: number of weight files.
        largest_file: bytes of the largest weight file.
    """

    bandwidth: int | None
    read: int
    files: int
    largest_file: int


PRINTED = LargePlan
