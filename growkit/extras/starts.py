"""The first values of new parts of a model, which contribute nothing at first, but train.

What writes the hidden states is zero; matrices before it are random; norms do not scale; recurrent
states start as those of Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060), matrices
of linear attention as those of Gated DeltaNet (arXiv 2412.06464), whose small numbers disturb a
trained model least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from growkit.algebra.splits import noise
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import TensorInfo
from growkit.extras.composed_transforms import Computed
from growkit.model.families.family_parts import Member
from growkit.planning.transforms import Constant, Transform


def new_tensor(member: Member, key: str, info: TensorInfo) -> Transform:
    """Make a tensor that no tensor of the source becomes.

    Args:
        member: the tensor.
        key: seed of its numbers, if they are random.
        info: its header.
    """
    tensor = member.tensor
    if isinstance(tensor.start, str):
        values = partial(_DRAWN[tensor.start], key, info.shape)
        return _computed(values, info, "new, as its paper starts")
    value = tensor.idle if tensor.start is None else tensor.start
    if value is None and len(info.shape) > 1:
        return drawn_uniformly(key, info)
    if value is None:
        value = float(tensor.norm is not None)
    return Constant(info.dtype, value - tensor.offset, "new")


def drawn_uniformly(key: str, info: TensorInfo) -> Transform:
    """Weights that are drawn as torch draws those of linear layers and convolutions.

    Args:
        key: seed of the numbers.
        info: header of the tensor.
    """
    return _computed(partial(_uniform, key, info.shape), info, "new, random")


def _computed(values: Callable[[], Tensor], info: TensorInfo, why: str) -> Transform:
    return Computed((), why, lambda: values().to(info.torch_dtype), dtype=info.dtype)


def _uniform(key: str, shape: tuple[int, ...]) -> Tensor:
    inputs = math.prod(shape[1:])
    return _numbers(key, shape[0], inputs).reshape(shape) / math.sqrt(inputs)


def _numbers(key: str, rows: int, columns: int) -> Tensor:
    """Random numbers between -1 and 1."""
    return torch.from_numpy(noise(key, np.arange(rows), columns).astype(np.float64) + 0.5) / 2**15


def _small(key: str, shape: tuple[int, ...]) -> Tensor:
    """Xavier's uniform numbers times 2^-2.5, as the authors of Gated DeltaNet draw matrices."""
    rows, columns = shape
    return _numbers(key, rows, columns) * (2**-2.5 * math.sqrt(6 / (rows + columns)))


def _decays(key: str, shape: tuple[int, ...]) -> Tensor:
    """Logarithms of the rates at which states decay."""
    return torch.arange(1, shape[0] + 1).double().log()


def _time_steps(key: str, shape: tuple[int, ...]) -> Tensor:
    """Biases whose softplus is between 0.001 and 0.1, evenly in the logarithm."""
    steps = torch.pow(10, _numbers(key, shape[0], 1)[:, 0] - 2)
    return steps + (-torch.expm1(-steps)).log()


_DRAWN: dict[str, Callable[[str, tuple[int, ...]], Tensor]] = {
    "decays": _decays,
    "small": _small,
    "time_steps": _time_steps,
}
"""From a seed and a shape, a tensor with one of the ``STARTS`` of descriptions."""
