"""The story of a probe: grow the candidates, train all of them alike, rank them at equal compute.

Recipes, folders and settings are looked at before torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.base.paths import name_of
from growkit.base.progress import Noting, Progress, Silent, steps
from growkit.base.units import size
from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.sources.source import Source, find
from growkit.engine.inside import Inside
from growkit.engine.texts import FILES, is_of_tokenizer, read_text
from growkit.probing.candidates import Candidate, candidates_of, inputs_of
from growkit.probing.settings import ProbeSettings
from growkit.probing.work import check_work, workplace
from growkit.recipe.recipe import Recipe
from growkit.results.probe import ProbeResult
from growkit.results.result import versions

if TYPE_CHECKING:
    from growkit.probing.text import Data


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
    """Find out which way of growing a model is worth it, if any is.

    Every candidate is grown and proved as its recipe says, then trained with AdamW by the law of
    updates (``growkit.training.param_groups``), and the source itself is trained on beside them.
    For a seed, all take the same windows in the same order. They begin without an optimizer's
    state, warm up, and stay at their rate. They are ranked by their loss on held-out text at equal
    compute: in floating-point operations as ``growkit.probing.arms`` counts them, where the
    cheapest has come to its end. Between two looks at the loss it is taken to follow a straight
    line. When a difference is noise is said in ``growkit.probing.noise``.

    Args:
        source: model folder, or one on the Hub; see ``growkit.grow``.
        candidates: recipes, or what ``growkit.run`` takes for one, whose source is this one or left
            out; their output is not written.
        text: UTF-8 text, of which the last tenth is held out.
        settings: how all are trained.
        work: folder where the grown models stay, and what is needed to go on after a kill; None for
            a temporary one.
        resume: continue the probe in ``work``; the figures are those of
            one that was not killed.
        progress: where progress is shown.

    Returns:
        The order, with everything that was measured.

    Raises:
        InputError: the source, the text, a recipe or the folder cannot be used, or no candidate can
            be trained. Some that cannot do not keep the others from being ranked.
    """
    began = time.monotonic()
    found = find(source)
    chosen = candidates_of(candidates, str(source), found)
    inputs = inputs_of(found, chosen, text)
    place = Path(work) if work is not None else None
    check_work(place, inputs, resume)
    read_text(str(text))  # a missing one is told before torch is imported
    model = found.open()
    if not any(map(is_of_tokenizer, model.opened.names(*FILES))):
        raise InputError(f"{model.opened} has no tokenizer to read {text} with; add tokenizer.json")

    from growkit.engine import devices
    from growkit.probing.arms import grown, the_source, train_all
    from growkit.probing.ranking import conclude
    from growkit.probing.text import make_data
    from growkit.probing.time_left import time_left, time_sentence
    from growkit.probing.training import computed_in

    device = devices.chosen(settings.device)
    data = make_data(text, found.folder, model.config, settings)
    run = data, settings, device
    with workplace(place, inputs, resume) as working:
        working.begin(_plan(model, data, chosen, settings, devices.called(device)))
        arms = [the_source(name_of(found.name), model, data, settings, device)]
        arms += [grown(each, working, data, settings, device, progress) for each in chosen]
        able = [arm for arm in arms if arm.stored is not None]
        if len(able) == 1:
            why = "; ".join(f"{arm.name}: {arm.reason}" for arm in arms[1:])
            raise InputError(f"no candidate is left to be trained: {why}")
        if isinstance(progress, Noting) and (left := time_left(able, working, *run)):
            progress.note(time_sentence(left))
        each_takes = settings.steps * settings.seeds * len(settings.lr)
        total = each_takes * sum(arm.step_flops or 0 for arm in able)
        with steps(progress, "training", total) as advance:
            train_all(able, working, *run, advance)
        inputs.check_unchanged([*model.model_files.values()])
    result = ProbeResult(
        equal_compute=None,
        source=found.name,
        reason="",
        early=False,
        candidates=[],
        differences=[],
        rule="",
        steps=settings.steps,
        seeds=settings.seeds,
        lr=list(settings.lr),
        weight_decay=settings.weight_decay,
        warmup=settings.warmup,
        batch=settings.batch,
        length=data.training.shape[1],
        dtype=computed_in(settings, device),
        device=devices.called(device),
        text=str(text),
        text_sha256=data.sha256,
        training_tokens=data.training.numel(),
        held_out_tokens=data.held_out.numel(),
        work=str(place) if place else None,
        warnings=list(_warnings(found, model, data, settings, chosen)),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 3),
        versions=versions(),
    )
    conclude(result, arms)
    return result


def reads_of(
    source: str | Path,
    candidates: Sequence[Recipe | str | Path],
    text: str | Path,
    work: str | Path | None,
) -> tuple[Inputs, list[Path]]:
    """What a probe reads, and the folders that it makes where it works, which nobody writes into.

    Raises:
        InputError: see ``probe``.
    """
    found = find(source)
    chosen = candidates_of(candidates, str(source), found)
    made = [Path(work) / each.folder for each in chosen] if work is not None else []
    return inputs_of(found, chosen, text), made


def _plan(
    model: Checkpoint,
    data: Data,
    chosen: Sequence[Candidate],
    settings: ProbeSettings,
    device: str,
) -> dict[str, str]:
    """Everything on which the figures depend, by what people call it."""
    import torch

    names = filter(is_of_tokenizer, model.opened.names(*FILES))
    files = model.model_files | {name: model.opened.require(name) for name in names}
    plan = {
        "the source": _hash({name: sha256(file) for name, file in files.items()}),
        "the text": data.sha256,
        "the device or its threads": f"{device}, {torch.get_num_threads()} threads",
        "the version of a library": _hash(versions()),
    }
    plan |= {name: _hash(value) for name, value in vars(settings).items()}
    for each in chosen:
        recipe = {**each.recipe.as_dict(), "source": None, "output": None}
        texts = [sha256(Path(text)) for text in each.recipe.texts]
        plan[f"candidate {each.folder}"] = _hash([recipe, texts])
    return plan


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _warnings(
    found: Source,
    model: Checkpoint,
    data: Data,
    settings: ProbeSettings,
    chosen: Sequence[Candidate],
) -> Iterator[str]:
    if found.warning:
        yield found.warning
    if isinstance(model, Inside):
        yield model.told()
    for each in chosen:
        if each.optimizer is not None:
            yield (
                f"{each.name} is trained without the optimizer's state that its recipe names, as "
                "the others are"
            )
    if data.cut:
        from growkit.probing.text import MOST_TEXT

        yield f"only the first {size(MOST_TEXT)} of the text were read"
    turns = settings.steps * settings.batch / len(data.training)
    if turns > 1:
        yield (
            f"the text has {data.training.numel():,} tokens to train on, so that every one is seen "
            f"{turns:.1f} times; what is learned from a larger text may rank otherwise"
        )
    if data.training.shape[1] < settings.length:
        yield f"windows have {data.training.shape[1]} tokens, as many as the source takes"
