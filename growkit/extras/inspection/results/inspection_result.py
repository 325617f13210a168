"""What a model is and allows, and what a recipe costs, in Python and as ``--json``."""

from growkit.results import Result
from growkit.results.growth_result import Costs, Described


class Attention(Result):
    """The differential attention of a model, independent of its layout.

    Attributes:
        variant: name of the variant.
        signal_heads: number of signal heads.
        noise_heads: number of noise heads.
        kv_heads: number of value heads, each with a key head for signal and (unless shared) noise.
        ratio: signal heads per noise head; null without noise heads.
        lambda_init: λ_init of every layer; null if the variant has none.
        lambda_value: λ of every layer; null if λ is projected from every token.
    """

    variant: str
    signal_heads: int
    noise_heads: int
    kv_heads: int
    ratio: int | None
    lambda_init: list[float] | None
    lambda_value: list[float] | None


class Possible(Result):
    """An operation that a model allows.

    Attributes:
        command: the command line; SRC is the model, OUT the output folder.
        promise: exact, bounded or different.
        becomes: family of the output.
    """

    command: str
    promise: str
    becomes: str


class Inspection(Result):
    """A checkpoint at a glance, as ``growkit inspect --json`` prints it.

    Attributes:
        folder: the model folder, or its name on the Hub.
        family: the family that describes it.
        model_class: the transformers class that the config names; null if it names none.
        config_sizes: the sizes in the config's own numbers, which options take as well.
        sizes: the size of every axis, e.g. hidden, signal_heads, noise_heads, head_dim.
        attention: the differential attention; null for other models.
        parameters: number of parameters; tied parameters count once.
        bytes: size of the tensors.
        dtype: torch name of the dtype of most parameters.
        quantised: how a quantised model is stored and read; null for a dense one.
        tied: whether the output head is the embedding.
        tensors: number of tensors.
        files: the weight files.
        dropped: tensors that growkit would leave out, with the reason.
        possible: the growths and conversions that the model allows, each on its own.
        inferred: how the family was inferred; null if growkit knows it.
    """

    folder: str
    family: str
    model_class: str | None
    config_sizes: dict[str, int | list[int]]
    sizes: dict[str, int]
    attention: Attention | None
    parameters: int
    bytes: int
    dtype: str
    quantised: str | None
    tied: bool
    tensors: int
    files: list[str]
    dropped: dict[str, str]
    possible: list[Possible]
    inferred: str | None = None


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


PRINTED = Inspection, list[Abilities], LargePlan
