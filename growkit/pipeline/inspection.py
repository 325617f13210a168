"""Inspection from config and headers: facts, operations, and a run's disk, memory and time.

Possible operations are found by planning: every operation plans the change of the model, and gives
a promise or is refused.

The disk of a run is a firm upper limit. Memory and time are scaled, by numbers of parameters and
tokens, from measurements with Llamas of several sizes (``benchmarks/results``: growth speed, proof
speed, proof memory). For these models estimates are off by up to a half; machines differ by more.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.options import Value
from growkit.base.settings import MAX_WHOLE_MODELS, Settings
from growkit.engine import recipe_planning
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.reading import Checkpoint, View
from growkit.model.checkpoint.scratch import report_faults
from growkit.model.checkpoint.writing import WORKERS, parse_bytes, shards_of
from growkit.model.families.family import family_of
from growkit.model.families.family_yaml import TIED
from growkit.model.model import Headers, Model
from growkit.planning import recipe as recipes
from growkit.planning.companions import companions
from growkit.planning.manifest import read_record, source_headers
from growkit.planning.operation import PROMISES, Operation, SizeOption, operations
from growkit.planning.own_class import own_classes
from growkit.planning.plan import SMALL as SMALL_TENSOR
from growkit.planning.recipe import load_description
from growkit.results import growth_result as results
from growkit.results.growth_result import Answer, Inspection, Possible
from growkit.results.proof_result import counted
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


# Costs of a run.

RESERVED_BYTES = 1 << 20
"""Bytes reserved on the disk for files without weights."""

BYTES_PER_ENTRY = 2560
"""Bytes reserved for every tensor's entries in headers, archives, indices and the manifest."""

MEMORY_OF_TORCH = 0.27e9
"""Bytes of memory that Python and torch take."""

MEMORY_OF_PROOF = 1.2e9
"""Bytes of memory of Python, torch, transformers and the activations of both models."""

SECONDS_TO_IMPORT = 2.0
"""Seconds to import torch, and the same again for transformers."""

BYTES_WRITTEN_PER_SECOND = 6e8
"""Bytes computed and written per second (``benchmarks/cost_model.py``)."""

SECONDS_PER_PARAMETER = 2.5e-8
"""Seconds of a proof for each parameter, regardless of tokens."""

SECONDS_PER_PARAMETER_AND_TOKEN = 2.6e-11
"""Seconds of a proof for each parameter and token."""


@report_faults()
@usual_torch()
def plan(
    recipe: recipes.Recipe | str | Path,
    *,
    bandwidth: str | None = None,
) -> results.LargePlan:
    """Estimate the files, disk, memory and time of a recipe. Nothing is written.

    Args:
        recipe: as in ``growkit.run``. Only headers of its source are read, with the few tensors
            whose values decide, or only its ``config.json`` if it has no weights; weights on the
            Hub are not downloaded.
        bandwidth: bytes per second of reading and writing, e.g. ``2GB``; None if only computation
            limits the speed.

    Raises:
        InputError: the recipe cannot be executed, or its plan needs weights; or a number cannot be
            used.
    """
    limit = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
    if isinstance(recipe, str | Path):
        recipe = recipes.load_recipe(recipes.recipe_file(Path(recipe)))
    origin = find(recipe.source, weights=False)
    source = origin.headers(family_for(origin, recipe.family))
    extra = Folder(origin.folder).carried_bytes()
    recipe = replace(recipe, source=origin.name)
    prepared = recipe_planning.plan_recipe(recipe, source)
    described = recipe_planning.planned_result(recipe, source, prepared)
    if not isinstance(source, Headers):
        prepared.lineage.check_values()
    elif deciding := prepared.lineage.deciding:
        described.warnings.append(
            f"whether this is possible depends on the values of {counted(len(deciding), 'tensor')} "
            f"(first {deciding[0]}), which this folder does not have"
        )
    target, exact = prepared.lineage.target, described.promise == "exact"
    stored = source.stored if isinstance(source, View) else source
    shards = shards_of(target.tensors, parse_bytes(recipe.shard_size))
    files = [tensors.total_bytes(shard.tensors) for shard in shards]
    sizes = (source, target), recipe.output_path, recipe.verify, extra
    for companion in companions():
        if path := companion.path(recipe):
            described.warnings.append(
                f"the estimate of the disk leaves out the grown {companion.what}, {path}; growkit "
                "run --dry-run includes it"
            )
    return results.LargePlan(
        **described | estimate(*sizes, exact=exact, bandwidth=limit),
        bandwidth=limit,
        read=tensors.total_bytes(stored.tensors),
        files=len(files),
        largest_file=max(files),
    )


def estimate(
    headers: tuple[Model, Model],
    output: Path,
    proof: Settings | None,
    extra: int,
    *,
    exact: bool,
    bandwidth: int | None = None,
) -> results.Estimate:
    """Estimate the costs of writing and proving a target.

    Args:
        headers: headers of the source and of the target.
        output: the output folder.
        proof: settings of the proof; None for no proof.
        extra: bytes of other files, see ``disk_needed``.
        exact: whether every weight is to be recovered, so that fewer tokens are compared.
        bandwidth: bytes per second of reading and writing; None for no limit.
    """
    source, target = headers
    place = next(parent for parent in output.parents if parent.exists())
    read, written = (tensors.total_bytes(model.tensors) for model in headers)
    moving = (read + written) / bandwidth if bandwidth else 0.0
    proving = None
    if proof is not None:
        parameters = sum(tensors.total_parameters(model.tensors) for model in headers)
        prompts, length = (proof.if_weights_recovered if exact else proof).amount
        per_parameter = SECONDS_PER_PARAMETER + SECONDS_PER_PARAMETER_AND_TOKEN * prompts * length
        proving = round(SECONDS_TO_IMPORT + parameters * per_parameter, 1)
    writing = SECONDS_TO_IMPORT + max(written / BYTES_WRITTEN_PER_SECOND, moving)
    return results.Estimate(
        disk_needed=disk_needed(target, extra),
        disk_free=shutil.disk_usage(place).free,
        memory=_memory(source, target, proof),
        write_seconds=round(writing, 1),
        proof_seconds=proving,
        basis="memory and time are scaled from runs on 2 CPU cores with a fast disk",
    )


def disk_needed(target: Model, extra: int) -> int:
    """Upper limit of an output's size in bytes.

    Args:
        target: headers of the target.
        extra: bytes of tokenizer files, an optimizer's state and the like.
    """
    entries = BYTES_PER_ENTRY * len(target.tensors)
    return tensors.total_bytes(target.tensors) + entries + extra + RESERVED_BYTES


def _memory(source: Model, target: Model, proof: Settings | None) -> int:
    """Estimate the memory of a process that writes and proves a target, in bytes."""
    largest = max((info.bytes for info in source.tensors.values()), default=0)
    in_parts = all(target.cuts(name) for name in target.tensors)
    memory = MEMORY_OF_TORCH + WORKERS * (min(largest, SMALL_TENSOR) if in_parts else largest)
    if proof is not None:
        in_float64 = 8 * sum(tensors.total_parameters(model.tensors) for model in (source, target))
        at_once = in_float64 if in_float64 <= MAX_WHOLE_MODELS else 0
        memory = max(memory, MEMORY_OF_PROOF + max(_largest_layer(target), at_once))
    return round(memory)


def _largest_layer(target: Model) -> int:
    """Bytes that a proof holds: a layer in float64, or a tensor outside the layers as stored."""
    held: dict[str, int] = {}
    for name, info in target.tensors.items():
        layer = re.match(r".*?\.\d+\.", name)
        part, size = (layer[0], 8 * info.elements) if layer else (name, info.bytes)
        held[part] = held.get(part, 0) + size
    return max(held.values(), default=0)
