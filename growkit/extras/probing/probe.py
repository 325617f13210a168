"""A probe: grow the candidates, train them under the same conditions, rank them at equal compute.

Recipes, folders and settings are checked before torch is imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.names import name_of
from growkit.base.progress import Progress, Silent, shown, steps
from growkit.base.units import size
from growkit.engine.prompts import check_tokenizer, read_text
from growkit.extras.probing.json_lines import hash_of, workplace
from growkit.extras.probing.probe_settings import Candidate, ProbeSettings, candidates_of, fitting
from growkit.extras.probing.results.probe_result import ProbeResult
from growkit.model.checkpoint.folder import TOKENIZER_FILES, is_of_tokenizer
from growkit.model.checkpoint.inputs import Inputs
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import report_faults
from growkit.model.checkpoint.writing import sha256
from growkit.planning.recipe import Recipe
from growkit.results import versions
from growkit.sources import Source, find

if TYPE_CHECKING:
    from growkit.extras.probing.arms import Bench, Data
    from growkit.extras.probing.ranking import Arm


@report_faults()
@usual_torch()
def probe(
    source: str | Path,
    candidates: Sequence[Recipe | str | Path],
    text: str | Path,
    settings: ProbeSettings = ProbeSettings(),
    *,
    work: str | Path | None = None,
    resume: bool = False,
    progress: Progress = Silent(),
) -> ProbeResult:
    """Measure whether growing a model pays, and which way pays most.

    Every candidate is grown and proved by its recipe, then trained with AdamW by the law of updates
    (``growkit.training.param_groups``). The source itself is trained too. For each seed, all models
    see the same windows in the same order. They start without an optimizer's state, warm up, and
    keep their rate. They are ranked by their loss on held-out text at equal compute, where the
    cheapest training ends; floating-point operations are counted by
    ``growkit.extras.probing.harness.flops_of``. Losses between two measurements are interpolated
    linearly. ``growkit.extras.probing.ranking`` defines when a difference is noise.

    Args:
        source: model folder, or one on the Hub; see ``growkit.grow``.
        candidates: recipes, in any form that ``growkit.run`` accepts. Their source is replaced by
            this one; their output is not written.
        text: UTF-8 text; its last tenth is held out.
        settings: settings of the training.
        work: folder for the grown models and the journal, from which a killed probe can be resumed;
            None for a temporary one.
        resume: continue the probe in ``work``; the figures equal those of an uninterrupted probe.
        progress: receives the progress.

    Returns:
        The ranking, with all measurements.

    Raises:
        InputError: the source, the text, a recipe or the folder cannot be used, or no candidate can
            be trained. If only some cannot be trained, the rest are ranked.
    """
    began = time.monotonic()
    resolved = find(source)
    chosen = candidates_of(candidates, str(source), resolved)
    files = [candidate.file for candidate in chosen if candidate.file]
    texts = [text, *(path for candidate in chosen for path in candidate.recipe.texts)]
    inputs = Inputs([resolved.folder, *texts, *files])
    with workplace(Path(work) if work is not None else None, inputs, resume) as working:
        read_text(str(text))  # a missing one is reported before torch is imported
        model = resolved.open()
        check_tokenizer(model.opened)
        chosen = [fitting(candidate, resolved) for candidate in chosen]

        from growkit.engine.device import choose_device, device_name
        from growkit.extras.probing.arms import Bench, make_data
        from growkit.extras.probing.ranking import conclude

        device = choose_device(settings.device)
        data = make_data(text, resolved.folder, model.config, settings)
        working.begin(_plan(model, data, chosen, settings, device_name(device)))
        bench = Bench(working, data, settings, device)
        arms = [bench.source(name_of(resolved.name), model)]
        with shown(progress):
            arms += [bench.grown(candidate) for candidate in chosen]
            _train(bench, arms, settings)
        inputs.check_unchanged([*model.model_files.values()])
    concluded = conclude(arms, settings)
    concluded["warnings"][:0] = _warnings(resolved, model, data, settings, chosen)
    return ProbeResult(
        **vars(settings)
        | concluded
        | {
            "source": resolved.name,
            "lr": list(settings.lr),
            **data.figures,
            "dtype": bench.dtype,
            "device": device_name(device),
            "text": str(text),
            "work": None if work is None else str(work),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 3),
            "versions": versions(),
        }
    )


def _train(bench: Bench, arms: Sequence[Arm], settings: ProbeSettings) -> None:
    """Train all candidates that can be trained, and the source."""
    able = [arm for arm in arms if arm.stored is not None]
    if len(able) == 1:
        why = "; ".join(f"{arm.entry.name}: {arm.entry.reason}" for arm in arms[1:])
        raise InputError(f"no candidate is left to be trained: {why}")
    runs = settings.steps * settings.seeds * len(settings.lr)
    flops = runs * sum(arm.step_flops for arm in able)
    with steps("training", flops) as advance:
        bench.train(able, advance)


def _plan(
    model: Checkpoint, data: Data, chosen: Sequence[Candidate], settings: ProbeSettings, device: str
) -> dict[str, str]:
    """Describe every input on which the figures depend, by its name for users."""
    import torch

    names = filter(is_of_tokenizer, model.opened.names(*TOKENIZER_FILES))
    files = model.model_files | {name: model.opened.require(name) for name in names}
    plan = {
        "the source": hash_of({name: sha256(file) for name, file in files.items()}),
        "the text": data.sha256,
        "the device or its threads": f"{device}, {torch.get_num_threads()} threads",
        "the version of a library": hash_of(versions()),
    }
    plan |= {name: hash_of(value) for name, value in vars(settings).items()}
    for candidate in chosen:
        recipe = {**candidate.recipe.as_dict(), "source": None, "output": None, "optimizer": None}
        texts = [sha256(Path(text)) for text in candidate.recipe.texts]
        plan[f"candidate {candidate.folder}"] = hash_of([recipe, texts])
    return plan


def _warnings(
    origin: Source, model: Checkpoint, data: Data, settings: ProbeSettings, chosen: list[Candidate]
) -> Iterator[str]:
    from growkit.extras.probing.arms import MAX_TEXT

    if origin.warning:
        yield origin.warning
    if model.note:
        yield model.note
    for candidate in chosen:
        if candidate.note:
            yield candidate.note
        if candidate.recipe.optimizer is not None:
            yield (
                f"{candidate.name} is trained without the optimizer's state that its recipe names, "
                "as all are"
            )
    if data.cut:
        yield f"only the first {size(MAX_TEXT)} of the text were read"
    turns = settings.steps * settings.batch / len(data.training)
    if turns > 1:
        yield (
            f"the text has {data.training.numel():,} tokens to train on, so that every one is seen "
            f"{turns:.1f} times; what is learned from a larger text may rank otherwise"
        )
    if data.training.shape[1] < settings.length:
        yield f"windows have {data.training.shape[1]} tokens, as many as the source takes"
