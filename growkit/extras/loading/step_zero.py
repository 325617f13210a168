"""A check at step 0: does the model in the trainer's memory compute the promised function?

It finds a wrong shard, conversion or folder before the first training step.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, TrainerCallback, TrainerState

from growkit.base.errors import InputError
from growkit.base.limits import COMPUTED, within
from growkit.engine.calls import Call
from growkit.engine.class_weights import class_weights
from growkit.engine.device import CPU, reproducible
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
from growkit.extras.optimizer.param_groups import check_same
from growkit.model.checkpoint.publishing import MANIFEST, read_manifest
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.manifest import changed_since
from growkit.proof.fingerprint import Question, computed_in, distance, fingerprint, question, widest
from growkit.proof.pair import check_vocabulary
from growkit.results.proof_result import Fingerprint

OTHER = "give the folder that it was loaded from"


def assert_preserved(model: nn.Module, folder: str | Path) -> float:
    """Compare a model in memory with the fingerprint in its folder, before the first step.

    The fingerprint holds some logits of the source, or of the written model if the folder promises
    another function. A folder without a proof has no fingerprint; its own files are then run one
    layer at a time, if they are unchanged since growkit wrote them. The model computes as in
    training, but without dropout, and is left unchanged. In distributed training every process
    must call this function, and every process raises if one of them finds a difference.

    Args:
        model: the trainer's model: plain or wrapped (FSDP2, FSDP, DDP, torch.compile, peft), with
            parameters of any dtype, under any mixed precision.
        folder: a folder that growkit wrote.

    Returns:
        Root mean square difference of the logits, relative to their scale.

    Raises:
        InputError: they differ by more than rounding does; or the folder cannot be used.
    """
    expected = expected_of(Path(folder))
    question = Question(Call(torch.tensor(expected.ids)), torch.tensor(expected.places))
    computed, dtype = _compute_logits(model, question, folder)
    logits = torch.tensor(expected.logits, dtype=torch.float64)
    measured = distance(logits, question.of(computed), expected.scale)
    measured = measured if math.isfinite(measured) else math.inf
    if distributed.is_available() and distributed.is_initialized():
        shared = torch.tensor(measured, device=computed.device, dtype=torch.float64)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        measured = float(shared)
    limit = expected.limits[dtype]
    if not within(measured, limit):
        whose = "its source" if expected.of == "source" else "the model that was written"
        raise InputError(
            f"the {type(model).__name__} in memory does not compute what {folder} promises: its "
            f"logits differ from those of {whose} by {measured:.1e} of their scale, rounding in "
            f"{dtype} explains {limit:.1e}; load the weights from that folder again, on every "
            "process, before the first step"
        )
    return measured


class AssertPreserved(TrainerCallback):
    """Calls ``assert_preserved`` at the start of training, for ``Trainer(callbacks=[...])``.

    The model is wrapped and sharded by then. A resumed run is not compared, since it no longer
    equals the folder.

    Args:
        folder: a folder that growkit wrote.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Compare the model, unless it has taken steps."""
        if state.global_step == 0:
            assert_preserved(kwargs["model"], self.folder)


def expected_of(folder: Path) -> Fingerprint:
    """The fingerprint in a folder's manifest, or computed from its files if there is none.

    Raises:
        InputError: growkit did not write the folder, or its files have changed.
    """
    checkpoint, file = Checkpoint(folder), folder / MANIFEST
    held: Any = read_manifest(checkpoint.opened)
    for key in ("verification", "sections", "logits"):
        held = held.get(key) if isinstance(held, dict) else None
    check_vocabulary(checkpoint)
    if isinstance(held, dict) and "fingerprint" in held:
        held = held["fingerprint"]
    else:
        if changed := changed_since(checkpoint, [*checkpoint.model_files]):
            raise InputError(
                f"{folder / changed[0]} is not what growkit wrote, and {file} holds no "
                "fingerprint; make the model again, or give the folder as it was"
            )
        held = _fingerprint_of(checkpoint)
    if held is None:
        raise InputError(
            f"the model in {folder} computes no usable logits, so it has no fingerprint"
        )
    try:
        return _parsed(held, checkpoint.config["vocab_size"])
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError):
        raise InputError(
            f"the fingerprint in {file} is damaged; make the model again with 'growkit run {file}'"
        ) from None


def _fingerprint_of(checkpoint: Checkpoint) -> Fingerprint | None:
    """Compute the fingerprint of the model in a folder, one layer at a time.

    Raises:
        InputError: the model cannot run.
    """
    asked, dtype = question(checkpoint), computed_in(checkpoint.tensors)
    with reproducible(CPU):
        with strict_float64():
            exact = Layerwise(checkpoint, torch.float64, CPU).logits(asked.call)
        rounded = Layerwise(checkpoint, getattr(torch, dtype), CPU).logits(asked.call)
    answers = asked.of(exact), asked.of(rounded)
    return fingerprint("target", asked, *answers, dtype, widest(checkpoint))


def _parsed(held: Any, vocabulary: int) -> Fingerprint:
    """Parse the fingerprint of a manifest.

    Raises:
        TypeError, KeyError, ValueError, OverflowError, RuntimeError: the content is malformed.
    """
    ids, places = (torch.tensor(held[key]) for key in ("ids", "places"))
    logits = torch.tensor(held["logits"], dtype=torch.float64)
    positive = (held["scale"], *(held["limits"][name] for name in COMPUTED))
    tokens = torch.cat([ids.flatten(), places.flatten()])
    fit = (
        ids.dtype == places.dtype == torch.long,
        ids.dim() == 1,
        logits.numel() > 0,
        places.shape == logits.shape == (len(ids), places.shape[-1]),
        bool(((tokens >= 0) & (tokens < vocabulary)).all()),
        bool(logits.isfinite().all()),
        all(0 < number < math.inf for number in positive),
        held["of"] in ("source", "target"),
    )
    if not all(fit):
        raise ValueError
    return Fingerprint(**held)


def keep_stored(model: nn.Module, folder: str | Path) -> list[str]:
    """Restore parameters that loading narrowed, in the dtype of the files.

    In layouts with a norm for every head, norm weights are products that only float64 holds
    (``docs/explanation/numerics.md``); ``from_pretrained(dtype=...)`` rounds them. Call this before
    the model is sharded, and not with FSDP2, which requires one dtype for all parameters of a
    layer.

    Args:
        model: the model, as transformers loaded it.
        folder: the folder that it was loaded from.

    Returns:
        The names of the restored parameters.

    Raises:
        InputError: the folder holds another model.
    """
    weights = class_weights(Checkpoint(folder))
    # Tied parameters are stored under another name.
    known = {name: p for name, p in model.named_parameters() if name in weights.tensors}
    check_same(model, {name: weights.tensors[name].shape for name in known}, folder)
    changed = []
    for name, parameter in known.items():
        dtype = weights.tensors[name].torch_dtype
        if torch.promote_types(dtype, parameter.dtype) != parameter.dtype:
            parameter.data = weights.read(name).to(parameter.device)
            changed.append(name)
    return changed


def _compute_logits(model: nn.Module, question: Question, folder: str | Path) -> tuple[Tensor, str]:
    """Compute all logits, [tokens, vocabulary], and the name of the dtype of the computation.

    Raises:
        InputError: the model has too few tokens or logits.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    ids = question.call.ids[None].to(device)
    # DDP itself would only prepare for gradients.
    called: Any = model.module if isinstance(model, DistributedDataParallel) else model
    fewest = 1 + max(int(question.places.max()), int(ids.max()))
    embedding = getattr(called, "get_input_embeddings", lambda: None)()
    if getattr(embedding, "num_embeddings", fewest) < fewest:
        raise InputError(
            f"the {type(model).__name__} in memory has fewer tokens than that in {folder}; {OTHER}"
        )
    with _undisturbed(model, device):
        # Models of other libraries take only tokens.
        known = isinstance(getattr(called, "config", None), PreTrainedConfig)
        output = called(ids, **({"use_cache": False} if known else {}))
        logits = output if isinstance(output, Tensor) else output.logits
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
    expect = (1, len(ids[0]), fewest)
    if logits.dim() != 3 or logits.shape[:2] != expect[:2] or logits.shape[2] < fewest:
        raise InputError(
            f"the {type(model).__name__} in memory computes logits of shape "
            f"{list(logits.shape)}, that in {folder} {list(expect)} or more; {OTHER}"
        )
    return logits[0], _computed_in(parameters, logits)


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a model as in training, but without dropout or gradients; restore its state after."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device]))
        if "torch._dynamo" in sys.modules:  # compilation is not worth it for one call
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
                if isinstance(module, FSDPModule):  # a root keeps gathered parameters for backward
                    module.reshard()


def _computed_in(parameters: Sequence[nn.Parameter], logits: Tensor) -> str:
    """The torch name of the least precise dtype that the computation shows.

    The only trace of mixed precision is that logits hold fewer digits than their dtype.
    """
    matrices = {p.dtype for p in parameters if p.dim() > 1 and p.is_floating_point()}
    seen = {name for name in COMPUTED if getattr(torch, name) in {*matrices, logits.dtype}}
    for name in ("bfloat16", "float16"):
        if torch.equal(logits.to(getattr(torch, name)).to(logits.dtype), logits):
            seen.add(name)
            break
    backends: Any = torch.backends
    matmuls = backends.cuda.matmul, backends.mkldnn.matmul
    if logits.device.type != "cpu" and any("tf32" in backend.fp32_precision for backend in matmuls):
        seen.add("float16")  # TF32 has as many digits
    return max(seen or {"float32"}, key=lambda name: torch.finfo(getattr(torch, name)).eps)
