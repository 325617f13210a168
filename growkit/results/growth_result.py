"""Results of operations and inspections, in Python and as ``--json``."""

from typing import Any

from growkit.results import Result
from growkit.results.proof_result import VerifyResult


class UpdateGroup(Result):
    """Tensors that share an optimizer's settings.

    Attributes:
        tensors: tensor names in the files; a ``*`` matches any number.
        lr: factor of the source's learning rate.
        weight_decay: factor of the source's decoupled weight decay.
        eps: factor of AdamW's eps.
        n_in: number of parts into which each weight is split; an average for unequal parts.
        n_out: numbers of copies that share a gradient, in ascending order; more than one number if
            rows differ.
        new: whether no tensor of the source trains like them.
        together: number of consecutive rows that must stay equal, so that a router chooses the
            pieces of an MLP together (``param_groups`` sees to it); 1 for no such rows.
    """

    tensors: list[str]
    lr: float
    weight_decay: float
    eps: float
    n_in: float
    n_out: list[float]
    new: bool
    together: int = 1


class Updates(Result):
    """Training factors with which the output learns as its source would.

    Attributes:
        exact: whether this reproduces the source's training up to rounding, as long as new
            parameters stay untrained.
        why: the reasons why it does not, one phrase each.
        single_rate: factor of the source's learning rate for a single rate for all tensors; it
            keeps the length of a step.
        groups: the factors of all tensors, by group.
    """

    exact: bool
    why: list[str]
    single_rate: float
    groups: list[UpdateGroup]


class ConfigChange(Result):
    """A key of ``config.json`` whose value changed.

    Attributes:
        key: name of the key.
        before: value in the source, as JSON; null if the source has none.
        after: value in the output, as JSON; null if the output has none.
    """

    key: str
    before: str | None
    after: str | None


class Costs(Result):
    """Estimated costs of a run.

    Attributes:
        disk_needed: bytes that the output needs; an earlier output is kept until it is replaced.
        memory: approximate upper limit of memory in bytes.
        write_seconds: approximate time of writing, in seconds.
        proof_seconds: approximate time of the proof, in seconds; null without a proof.
        basis: the basis of the figures for memory and time.
    """

    disk_needed: int
    memory: int
    write_seconds: float
    proof_seconds: float | None
    basis: str


class Estimate(Costs):
    """Estimated costs of a run on this machine.

    Attributes:
        disk_free: free bytes on the output's disk.
    """

    disk_free: int


class Described(Result):
    """Facts that follow from the plan of an operation.

    Attributes:
        source: the source folder, or its name on the Hub.
        output: the output folder, written or planned (``OUT.rejected`` if a promise was broken).
        promise: ``exact``, ``bounded`` or ``different``.
        lost: the loss, in one line; null if there is none.
        source_parameters: number of parameters of the source; tied parameters count once.
        parameters: number of parameters of the output, likewise.
        dtype: torch name of the dtype of most of the output's parameters.
        warnings: warnings to read before using the output.
        inferred: how the family of the source was inferred; null if growkit knows it.
    """

    source: str
    output: str
    promise: str
    lost: str | None
    source_parameters: int
    parameters: int
    dtype: str
    warnings: list[str]
    inferred: str | None = None


class RankTried(Result):
    """A rank that a search tried, with its cost.

    Attributes:
        layer: index of the layer, from 0; null for all layers alike.
        rank: rank of the updates, or numbers of a compressed latent.
        kl_nats_per_token: the KL that it costs, if the search was for a tolerance; else null.
        energy: the share of energy that it keeps, if the search was for an energy; else null.
        chosen: whether the search chose it.
    """

    layer: int | None
    rank: int
    kl_nats_per_token: float | None
    energy: float | None
    chosen: bool


class PlannedTensor(Result):
    """One line of a dry run: a tensor of the output and its origin.

    Attributes:
        tensor: name of the tensor in the output.
        sources: names of the source tensors from which it is computed.
        source_shapes: shapes of the source tensors.
        shape: shape of the tensor.
        dtype: safetensors name of its dtype, e.g. ``BF16``.
        why: the computation, step by step.
    """

    tensor: str
    sources: list[str]
    source_shapes: list[list[int]]
    shape: list[int]
    dtype: str
    why: str


class GrowResult(Described):
    """The result of an operation, as ``--json`` prints it.

    Attributes:
        kept: whether the proof held; null without a proof (dry run, ``--no-verify``).
        bytes: size of the output's tensors.
        rounded: the narrower dtype to which the source was rounded on request, once and before
            all other steps; the promise then holds for the rounded source. Null without rounding.
        loads_with: the software that runs the output, if plain transformers does not; else null.
        copies: for each step, the number of copies of every grown axis.
        write_seconds: time from reading the first tensor to writing the last; null in a dry run.
        dry_run: whether nothing was written.
        plan: in a dry run, every tensor of the output; else empty.
        dropped: source tensors that are not in the output, with the reason.
        config: changed keys of ``config.json``.
        ranks: the ranks that were tried, if one was searched for.
        estimate: in a dry run, the estimated costs of a run; else null.
        updates: how to continue training; null in a dry run.
        verification: the verdict; null without a proof.
        optimizer: the growth of the optimizer's state; null if none was given.
        adapter: the growth of the adapter; null if none was given.
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
    optimizer: Any = None  # extras describe what grows with a model
    adapter: Any = None


class Story(Result):
    """The result of the demo.

    Attributes:
        growth: the growth with its proof on held-out text.
        opening: the text that both models continue.
        before: the source's greedy continuation.
        after: the grown model's greedy continuation.
        kept_in: folder of the grown model; null if it was deleted.
    """

    growth: GrowResult
    opening: str
    before: str
    after: str
    kept_in: str | None
