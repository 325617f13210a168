"""A source and its target, opened once for all checks of a proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from growkit.base.progress import current
from growkit.base.settings import Settings
from growkit.base.tensors import total_bytes
from growkit.engine.device import check_subnormal_numbers, choose_device, reproducible
from growkit.engine.prompts import Prompts, make_prompts
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.plan import Lineage
from growkit.planning.recipe import Recipe
from growkit.proof.vocabularies import check_vocabularies, check_vocabulary
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
