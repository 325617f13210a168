"""What is reported of a checkpoint, a folder, the families, and an inferred family."""

from typing import Any

from growkit.base.limits import within
from growkit.results import Result

EXACT = 1e-10
"""Of logits, relative to their scale: far above rounding in float64, far below any fault."""


class Attention(Result):
    """The differential attention of a model, independent of its layout.

    Attributes:
        variant: what it is called.
        signal_heads: number of signal heads.
        noise_heads: number of noise heads.
        kv_heads: number of value heads, each with a key head for signal and (unless shared) noise.
        ratio: signal heads per noise head; null where there are no noise heads.
        lambda_init: λ_init of every layer; null where there is none.
        lambda_value: λ of every layer; null where it is projected from every token.
    """

    variant: str
    signal_heads: int
    noise_heads: int
    kv_heads: int
    ratio: int | None
    lambda_init: list[float] | None
    lambda_value: list[float] | None


class Possible(Result):
    """Something that can be done with a model.

    Attributes:
        command: on the command line; SRC is the model, OUT the folder to be made.
        promise: exact, bounded or different.
        becomes: the family of what is made.
    """

    command: str
    promise: str
    becomes: str


class Inspection(Result):
    """A checkpoint at a glance, as ``growkit inspect --json`` prints it.

    Attributes:
        folder: where it is.
        family: the family that describes it.
        model_class: the transformers class named in its config; null if it names none.
        config_sizes: the sizes in the config's own numbers, which are those that options take.
        sizes: the size of every axis, e.g. hidden, signal_heads, noise_heads, head_dim.
        attention: the differential attention; null for models that have none.
        parameters: number of parameters, ties counted once.
        bytes: size of the tensors.
        dtype: torch name of the dtype that holds most parameters.
        tied: whether the output head is the embedding.
        tensors: number of tensors.
        files: the files with the weights.
        dropped: tensors that growkit would leave out, and why.
        possible: the growths and conversions that this model takes, each alone.
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
    tied: bool
    tensors: int
    files: list[str]
    dropped: dict[str, str]
    possible: list[Possible]


class Answer(Result):
    """What became of a question.

    Attributes:
        operation: a growth method, or the variant or layout of a conversion.
        options: of the operation, as on the command line.
        tied: whether the output head of the model is its embedding; null where the family leaves
            that open.
        promise: exact, bounded or different; null where there is no plan.
        becomes: the family of what is made; null where there is no plan.
        why: why there is none; null where there is one.
        only: config keys, other than sizes, that this requires.
    """

    operation: str
    options: dict[str, str]
    tied: bool | None
    promise: str | None
    becomes: str | None
    why: str | None
    only: dict[str, str]


class Abilities(Result):
    """What can be done to the models of a type, as ``growkit families --json`` lists it.

    Attributes:
        family: the name of their family.
        model_types: their ``model_type``.
        grow: the answers of growth methods, for as much as it takes to know what can be had.
        convert: the answers of conversions.
    """

    family: str
    model_types: list[str]
    grow: list[Answer]
    convert: list[Answer]


class Trial(Result):
    """A growth of a small random model of a class.

    Attributes:
        axis: what it is about.
        options: of the growth.
        error: the largest difference of its logits in strict float64, relative to their scale; null
            where there is no such model.
        why: why there is none; null where there is one.
    """

    axis: str
    options: dict[str, str]
    error: float | None
    why: str | None

    @property
    def exact(self) -> bool:
        """Whether the larger model computes the same."""
        return within(self["error"], EXACT)

    @property
    def wrong(self) -> bool:
        """Whether it computes something else."""
        return self["error"] is not None and not self.exact


class Evidence(Result):
    """Why a tensor's pattern is what it is.

    Attributes:
        tensor: its name.
        pattern: what it reads and writes.
        by_number: what each dimension could be, by the number of the checkpoint alone.
        others: other patterns that its class allows.
    """

    tensor: str
    pattern: str
    by_number: list[list[str]]
    others: list[str]


class Inference(Result):
    """A family that was inferred, as ``growkit inspect --infer --json`` prints it.

    Attributes:
        model_class: of transformers.
        family: the description, as ``growkit.grow`` takes it.
        tensors: why patterns are what they are.
        trials: what became of a small random model that was grown like this.
        tried: number of descriptions that were tried.
        sure: whether every growth that could be tried computes the same.
        yaml: the description as a file, with all of this in comments.
    """

    model_class: str
    family: dict[str, Any]
    tensors: list[Evidence]
    trials: list[Trial]
    tried: int
    sure: bool
    yaml: str


class Difference(Result):
    """One file that is not what the manifest recorded.

    Attributes:
        file: its path in the folder.
        what: ``missing``, ``extra``, ``changed`` or ``unreadable``.
        why: of a file that cannot be read, why not; else null.
        recorded_bytes: its size in the manifest, where that is another; else null.
        found_bytes: its size now, where that is another; else null.
        recorded_sha256: its SHA-256 in the manifest, where size is the same and that is not; else
            null.
        found_sha256: its SHA-256 now, where size is the same and that is not; else null.
    """

    file: str
    what: str
    why: str | None = None
    recorded_bytes: int | None = None
    found_bytes: int | None = None
    recorded_sha256: str | None = None
    found_sha256: str | None = None


class CheckResult(Result):
    """Whether a folder is what its manifest recorded, as ``--json`` prints it.

    Attributes:
        folder: the folder.
        whole: whether every recorded file is there as it was written, and nothing else.
        reason: the same in a sentence.
        files: number of files that were recorded.
        bytes: size of these together.
        created: when the folder was made, from its manifest; null if that is not recorded.
        differences: every file that is missing, extra, changed or unreadable.
    """

    folder: str
    whole: bool
    reason: str
    files: int
    bytes: int
    created: str | None
    differences: list[Difference]


def difference_sentence(found: Difference) -> str:
    """A difference on one line."""
    why = found.why
    if found.recorded_sha256 is not None:
        why = f"SHA-256 {found.recorded_sha256} was recorded, {found.found_sha256} found"
    elif found.recorded_bytes is not None:
        why = f"{found.recorded_bytes:,} bytes were recorded, {found.found_bytes:,} found"
    return f"{found.what}: {found.file}" + (f" ({why})" if why else "")
