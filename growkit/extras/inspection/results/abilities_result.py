"""What models of a family allow, in Python and as ``--json``."""

from growkit.results import Result


class Answer(Result):
    """Whether a model allows an operation, and with which promise.

    Attributes:
        operation: a growth method, or the variant or layout of a conversion.
        options: options of the operation, as on the command line.
        tied: whether the output head of the model is its embedding; null if the family has no such
            switch.
        promise: exact, bounded or different; null if the operation is refused.
        becomes: family of the output; null if the operation is refused.
        why: the reason for refusal; null if the operation is allowed.
        only: required values of config keys that are not sizes.
    """

    operation: str
    options: dict[str, str]
    tied: bool | None
    promise: str | None
    becomes: str | None
    why: str | None
    only: dict[str, str]


class Abilities(Result):
    """The operations that models of a type allow, as ``growkit families --json`` lists them.

    Attributes:
        family: name of the family.
        model_types: the ``model_type``.
        grow: answers for growth methods: for each size, factors up to the first exact one.
        convert: answers for conversions.
    """

    family: str
    model_types: list[str]
    grow: list[Answer]
    convert: list[Answer]


PRINTED = list[Abilities]
