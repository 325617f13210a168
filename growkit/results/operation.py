"""What operations, inspections and checks report: the results of Python and of ``--json``."""

from collections.abc import Sequence
from typing import Any

from growkit.base.limits import within
from growkit.results import Result
from growkit.results.proof import Found, VerifyResult, next_step


class UpdateGroup(Result):
    """Tensors that an optimizer treats alike.

    Attributes:
        tensors: their names in the files; a ``*`` matches any number.
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


class ConfigChange(Result):
    """A key of ``config.json`` that is another one in the output.

    Attributes:
        key: its name.
        before: its value in the source, as JSON; null where the source has none.
        after: its value in the output, as JSON; null where the output has none.
    """

    key: str
    before: str | None
    after: str | None


class Costs(Result):
    """What a run will take.

    Attributes:
        disk_needed: bytes that the output needs; it is written next to an earlier one.
        memory: bytes of memory, at most about.
        write_seconds: about how long writing takes.
        proof_seconds: about how long the proof takes; null if there is none.
        basis: what memory and times rest on.
    """

    disk_needed: int
    memory: int
    write_seconds: float
    proof_seconds: float | None
    basis: str


class Estimate(Costs):
    """What a run will take, on this machine.

    Attributes:
        disk_free: bytes that the disk of the output has left.
    """

    disk_free: int


class Described(Result):
    """What follows from the plan of an operation.

    Attributes:
        source: the source folder, or its name on the Hub.
        output: the folder that was written (``OUT.rejected`` if a promise was broken), or would be.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what is lost, in one line; null if nothing is.
        source_parameters: number of parameters of the source, ties counted once.
        parameters: the same of the output.
        dtype: torch name of the dtype that holds most of them.
        warnings: what should be known before the output is used.
    """

    source: str
    output: str
    promise: str
    lost: str | None
    source_parameters: int
    parameters: int
    dtype: str
    warnings: list[str]


class LargePlan(Described, Costs):
    """What a recipe takes, as ``growkit plan`` prints it.

    Attributes:
        bandwidth: bytes per second that can be read and written; null for no limit.
        read: bytes of the source's tensors.
        files: number of files with weights.
        largest_file: bytes of the largest one.
    """

    bandwidth: int | None
    read: int
    files: int
    largest_file: int


class RankTried(Result):
    """A rank that was tried in a search, and what it costs.

    Attributes:
        layer: the layer that it is for, counted from 0; null for all layers alike.
        rank: of the updates.
        kl_nats_per_token: what it costs, where the search was for a tolerance; else null.
        energy: the share that it keeps, where the search was for an energy; else null.
        chosen: whether it is the one that was found.
    """

    layer: int | None
    rank: int
    kl_nats_per_token: float | None
    energy: float | None
    chosen: bool


class PlannedTensor(Result):
    """One line of a dry run: a tensor of the output, and how it comes about.

    Attributes:
        tensor: its name in the output.
        sources: names of the source's tensors that it is made of.
        source_shapes: the shapes of these.
        shape: its own.
        dtype: as safetensors names it, e.g. ``BF16``.
        why: what is done, step by step.
    """

    tensor: str
    sources: list[str]
    source_shapes: list[list[int]]
    shape: list[int]
    dtype: str
    why: str


class OptimizerResult(Result):
    """What became of an optimizer's state.

    Attributes:
        path: the file or folder that it was read from.
        format: of the files, as they were read and are written.
        moments: the kinds of tensors that grow with the weights.
        step: the most steps that a parameter has taken; null where they are not counted.
        groups: the number of parameter groups, in the source's state in a dry run.
        bytes: size of its tensors, about that in a dry run.
        reset: parameters that begin without moments, and why; empty in a dry run.
        beside: other files of the training run next to the state, and what happens to each.
        assumed: the order of the parameters that was assumed, because the files do not name them;
            empty if they do.
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


class GrowResult(Described):
    """What an operation did, as ``--json`` prints it.

    Attributes:
        kept: whether the proof held; null if there was none (dry run, ``--no-verify``).
        bytes: size of the output's tensors.
        rounded: the dtype to which the source was rounded, once, before all else, because a
            narrower one was asked for; what is promised holds of the rounded source. Null if
            nothing was rounded so.
        loads_with: what runs the output, where that is not transformers as it is; else null.
        copies: for each step, the number of copies of every grown axis.
        write_seconds: from reading the first tensor to writing the last; null in a dry run.
        dry_run: whether nothing was written.
        plan: in a dry run, every tensor of the output; else empty.
        dropped: source tensors that are not in the output, and why.
        config: what of ``config.json`` is another in the output.
        ranks: the ranks that were tried, where one was searched for.
        estimate: in a dry run, what a run would take; else null.
        updates: how to go on training; null in a dry run.
        verification: the verdict; null if there was none.
        optimizer: what became of the optimizer's state; null if none was given.
    """

    kept: bool | None = None
    bytes: int
    rounded: str | None
    loads_with: str | None
    copies: list[dict[str, int]]
    write_seconds: float | None = None
    dry_run: bool
    plan: list[PlannedTensor]
    dropped: dict[str, str]
    config: list[ConfigChange]
    ranks: list[RankTried]
    estimate: Estimate | None = None
    updates: Updates | None = None
    verification: VerifyResult | None = None
    optimizer: OptimizerResult | None = None


class Story(Result):
    """What the demo did.

    Attributes:
        growth: the growth with its proof on held-out text.
        opening: what both models were given to continue.
        before: the source's greedy continuation.
        after: the grown model's.
        kept_in: folder of the grown model; null if it was thrown away.
    """

    growth: GrowResult
    opening: str
    before: str
    after: str
    kept_in: str | None


def class_sentence(changes: Sequence[Found]) -> str | None:
    """The class of the source and that of the output; None where it stays.

    Args:
        changes: of ``config.json`` (each a ``ConfigChange``).
    """
    for key in ("architectures", "model_type"):
        for each in changes:
            if each["key"] == key and each["before"] and each["after"]:
                was, now = (each[side].strip('[]"') for side in ("before", "after"))
                return f"class: {was} → {now}"
    return None


def training_hint(result: Found) -> str | None:
    """How to train an output (a ``growkit.GrowResult``), without a full stop.

    None if nothing was written, or its proof gives other advice.
    """
    updates, proof = result.get("updates"), result.get("verification")
    if not updates or (proof and next_step(proof)):
        return None
    return (
        "train it with growkit.training.param_groups, which takes the source's learning rate; "
        "before a long run, growkit probe measures on your text whether that pays, compared with "
        "training the source for longer"
    )


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
