"""A source and its target, opened once for all checks of a proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from growkit.base.errors import InputError
from growkit.base.progress import current
from growkit.base.settings import Settings
from growkit.base.tensors import total_bytes
from growkit.engine.device import check_subnormal_numbers, choose_device, reproducible
from growkit.engine.prompts import Prompts, make_prompts
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.plan import Lineage
from growkit.planning.recipe import Recipe
from growkit.proof.weights import allow_blocks, as_planned, lineage_of


@dataclass(frozen=True)
class Request:
    """A proof that is asked for.

    Attributes:
        before: the source.
        after: the target.
        settings: settings of the proof.
        recipe: the recipe of the target; None if it is not known.
        optimizer: path of the source's optimizer state; None if it is not known.
        adapter: folder of the source's adapter; None if it is not to be compared.
        logits: files of logits that programs computed with the target.
    """

    before: Checkpoint
    after: Checkpoint
    settings: Settings
    recipe: Recipe | None
    optimizer: Path | None = None
    adapter: Path | None = None
    logits: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Pair(Request):
    """What is compared, and how; its source is as the target continues it, rounded if it is.

    Attributes:
        stored: the source as it is stored.
        lineage: how the target was made; without plans if that is not known.
        device: device of both models as they run.
        prompts: the prompts.
        advance: called with the bytes of every layer of both models.
        varying: operations that ran and have no deterministic form; it grows as operations run.
    """

    stored: Checkpoint
    lineage: Lineage
    device: torch.device
    prompts: Prompts
    advance: Callable[[int], None]
    varying: list[str]

    @property
    def exact(self) -> bool:
        """Whether the promise is exact."""
        return self.lineage.promise == "exact"

    @property
    def more_tokens(self) -> bool:
        """Whether the target has more tokens than the source."""
        return bool(self.after.config["vocab_size"] > self.before.config["vocab_size"])

    def if_weights_recovered(self) -> Pair:
        """The same pair with the fewer prompts that are enough if no weight can be at fault."""
        return replace(self, prompts=self.prompts.cut(*self.settings.if_weights_recovered.amount))


@contextmanager
def open_pair(request: Request) -> Iterator[Pair]:
    """Open a pair, with torch set to full precision inside this context.

    Raises:
        InputError: the two cannot be compared.
    """
    before, after, settings = request.before, request.after, request.settings
    for checkpoint in (before, after):
        check_vocabulary(checkpoint)
    check_subnormal_numbers()
    device = choose_device(settings.device)
    total = 2 * (total_bytes(before.tensors) + total_bytes(after.tensors))
    bar = current().bytes("proving", total)
    with reproducible(device) as varying, bar as advance, ExitStack() as views:
        lineage = lineage_of(before, after, request.recipe)
        if lineage.unknown and settings.max_kl is not None:
            lineage = allow_blocks(lineage, after)
        planned = as_planned(before, lineage)
        for plan in lineage.plans:
            if plan.tokens:
                planned = views.enter_context(plan.tokens.select(planned))
        check_vocabularies(planned, after)
        after = after.with_family(lineage.source.described)
        yield Pair(
            **vars(request) | {"before": planned, "after": after},
            stored=before,
            lineage=lineage,
            device=device,
            prompts=make_prompts(settings, planned.opened.path, planned.config),
            advance=advance,
            varying=varying,
        )


def check_vocabularies(before: Checkpoint, after: Checkpoint) -> None:
    """Refuse a target with a smaller vocabulary than the source.

    Raises:
        InputError: its vocabulary is smaller.
    """
    sizes = [model.config["vocab_size"] for model in (before, after)]
    if sizes[1] < sizes[0]:
        raise InputError(
            f"vocab_size is {sizes[0]} in {before.folder} and {sizes[1]} in {after.folder}; only a "
            f"target may have more tokens (the source comes first; if it is {after.folder}, swap "
            "the two)"
        )


def check_vocabulary(checkpoint: Checkpoint) -> None:
    """Refuse a config without a usable ``vocab_size``.

    Raises:
        InputError: ``vocab_size`` is not a whole number above 0, or is that of a part.
    """
    size, kind = checkpoint.config.get("vocab_size"), checkpoint.config.get("model_type")
    if size is None and isinstance(checkpoint.config.get("text_config"), dict):
        raise InputError(
            f"the language model inside the {kind} model in {checkpoint.folder} cannot be taken "
            "out by the names of its tensors; save it as a folder of its own"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(
            f"vocab_size is {size!r} in {checkpoint.folder}; a whole number above 0 was "
            "expected, correct config.json"
        )
