"""Inspection of a model from its config and headers: facts, and the operations that it allows.

Possible operations are found by planning: every operation plans the change of the model, and gives
a promise or is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.options import Value
from growkit.engine import recipe_planning
from growkit.extras.inspection.results.inspection_result import Answer, Inspection, Possible
from growkit.extras.shrinking.reductions.undo import source_headers
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import report_faults
from growkit.model.families.family import family_of
from growkit.model.families.family_yaml import TIED
from growkit.model.model import Headers, Model
from growkit.planning import recipe as recipes
from growkit.planning.manifest import read_record
from growkit.planning.operation import PROMISES, Operation, SizeOption, operations
from growkit.planning.own_class import own_classes
from growkit.planning.recipe import load_description
from growkit.sources import family_for, find

FACTORS = ("x3/2", "x2", "x4")
"""Sizes to try, in this order, until one is exact."""


MAX_TENSORS = 3000
"""Number of tensors above which a model is planned with fewer experts."""

FEW_EXPERTS = 16


@report_faults()
@usual_torch()
def inspect(
    folder: str | Path, *, family: str | Path | Mapping[str, Any] | None = None
) -> Inspection:
    """Describe a model folder from its headers; of its data, only the vectors of λ are read.

    Args:
        folder: the model's folder, or its name on the Hub; see ``growkit.grow``.
        family: see ``growkit.grow``.

    Raises:
        InputError: the folder has no checkpoint of a known family, or its tensors do not fit its
            config.
    """
    source = find(folder)
    described = load_description(family)
    checkpoint = source.open(family_for(source, described))
    stored = checkpoint.family
    facts = (own.attention(checkpoint) for own in own_classes().values())
    dropped, _ = checkpoint.unused
    complete = checkpoint.complete
    architectures = checkpoint.config.get("architectures") or None
    used = {name: info for name, info in checkpoint.tensors.items() if name not in dropped}
    return Inspection(
        folder=source.name,
        family=stored.name,
        model_class=str(architectures[0]) if isinstance(architectures, list) else None,
        config_sizes={key: complete[key] for key in stored.axes_of(complete)},
        sizes={
            axis: size for axis, size in checkpoint.sizes.items() if axis not in stored.constants
        },
        attention=next(filter(None, facts), None),
        parameters=tensors.total_parameters(used),
        bytes=tensors.total_bytes(used),
        dtype=tensors.TORCH_NAMES[tensors.main_dtype(used)],
        quantised=checkpoint.quantised or None,
        tied=bool(complete.get(TIED)),
        tensors=len(used),
        files=[file.name for file in checkpoint.files],
        dropped={**dropped, **checkpoint.left_out},
        possible=[*_possibilities(checkpoint), *_undoable(checkpoint)],
        inferred=stored.inferred,
    )


def _possible(verb: str, how: str, answer: Answer) -> Possible:
    words = [] if answer.operation == recipes.DEFAULT_METHOD else [how, answer.operation]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in answer.options.items()]
    command = f"growkit {verb} SRC OUT {' '.join(words)}"
    return Possible(command=command, promise=str(answer.promise), becomes=str(answer.becomes))


def _possibilities(model: Model) -> Iterator[Possible]:
    """List the possible operations on one model: sizes with their best promise, and conversions."""
    model = _with_few_experts(model)
    for operation in operations("grow").values():
        answers: dict[str, Answer] = {}
        sizes = {option.name for option in operation.options if isinstance(option, SizeOption)}
        asked = [answer for answer in growths(operation, model) if answer.promise]
        for growth in sorted(asked, key=lambda answer: PROMISES.index(str(answer.promise))):
            answers.setdefault(next(name for name in growth.options if name in sizes), growth)
        yield from (_possible("grow", "--method", answer) for answer in answers.values())
    for operation in operations("convert").values():
        answer = planned_answer("convert", operation, model)
        if answer.promise:
            yield _possible("convert", "--to", answer)


def _undoable(checkpoint: Checkpoint) -> Iterator[Possible]:
    """The way back of a folder that was grown, as its manifest says it; no weight is read."""
    with suppress(InputError):  # a manifest may be anything
        recipe = read_record(checkpoint.opened)
        if recipe and {step.verb for step in recipe.steps} == {"grow"}:
            before = source_headers(checkpoint.opened, checkpoint.tensors, checkpoint.described)
            promise = "exact until it is trained"
            command = "growkit shrink SRC OUT"
            yield Possible(command=command, promise=promise, becomes=before.family.name)


def _with_few_experts(model: Model) -> Model:
    """Reduce the experts of a model that has very many tensors; return any other as it is."""
    family = model.family
    sizes = model.sizes
    if len(model.tensors) <= MAX_TENSORS or sizes.get("experts", 0) <= FEW_EXPERTS:
        return model
    try:
        config = family.resized(model.config, sizes | {"experts": FEW_EXPERTS})
    except InputError:
        return model
    return Headers(family, config, model.where())


def growths(operation: Operation, model: Model) -> Iterator[Answer]:
    """Plan every size of a method, exact and rounded, up to the first exact factor."""
    sizes = [option for option in operation.options if isinstance(option, SizeOption)]
    rounding = any(option.name == "promise" for option in operation.options)
    for size in sizes:
        for factor in FACTORS:
            answer = planned_answer("grow", operation, model, **{size.name: factor})
            yield answer
            if answer.promise == "exact":
                break
            if rounding:
                rounded = {size.name: factor, "promise": "bounded"}
                bounded = planned_answer("grow", operation, model, **rounded)
                if bounded.promise:
                    yield bounded


def planned_answer(verb: str, operation: Operation, model: Model, **more: Value) -> Answer:
    """Plan an operation with these options, and with an example of each that it requires."""
    examples = {option.name: option.example for option in operation.options}
    options = {name: of for name, of in examples.items() if of is not None} | more
    promise = becomes = why = None
    try:
        step = recipes.STEPS[verb](operation.name, options)
        planned = recipe_planning.change(step, model, seed=0, complete_configs=False)
    except InputError as error:
        why = str(error)
    else:
        promise = planned.promise
        becomes = family_of(planned.plans[-1].config, model.where(), model.described).name
    return Answer(
        operation=operation.name,
        options={name: str(value) for name, value in options.items()},
        tied=model.config.get(TIED),
        promise=promise,
        becomes=becomes,
        why=why,
        only={},
    )
