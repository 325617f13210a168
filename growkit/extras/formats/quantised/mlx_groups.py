"""MLX: integers of 2 to 8 bits with a scale and a bias for every group of inputs, or MXFP4.

https://github.com/ml-explore/mlx, ``mlx.core.quantize``; numbers are a stream of bits. Some layers
may have settings of their own, by the path of the layer in mlx-lm, or be dense.
"""

from collections.abc import Iterator
from math import gcd, prod
from typing import Any

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import powers_of_two, unpack
from growkit.extras.formats.quantised.mxfp4 import VALUES

BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,)}
"""Bits of a number, by mode."""

WORD = 32
"""Bits of the words into which numbers are packed."""

STACKED = ".switch_mlp."
"""In the paths of experts, which are one layer for MLX."""


class Mlx(Scheme):
    """See the module."""

    method = "mlx"
    title = "MLX's blocks"
    suffixes = (".scales", ".biases", ".weight")

    def applies(self, settings: Config) -> bool:
        """See ``Scheme``; MLX names no method."""
        return "quant_method" not in settings and {"bits", "group_size"} <= settings.keys()

    def unread(self, settings: Config) -> str:
        """See ``Scheme``."""
        for mode, bits, group in _kinds(settings):
            if type(bits) is not int or bits not in BITS.get(mode, ()):
                return f"mode {mode!r} with {bits!r} bits"
            if type(group) is not int or group < 1 or group * bits % WORD:
                return f"group_size {group!r}"
        return ""

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``; weights have the dtype of the scales, or bfloat16."""
        shape = parts.shape(".weight")
        parts.check(".weight", shape, "U32")
        scales = parts.shape(".scales")
        mode, bits, _ = _kind(parts, settings)
        if mode == "mxfp4":
            parts.check(".scales", scales, "U8")
            dtype = "BF16"
        else:
            dtype = parts.check(".scales", scales, "F16", "BF16", "F32")
            parts.check(".biases", scales, dtype)
        return TensorInfo((shape[0], shape[1] * WORD // bits), dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; rounded after each operation, as MLX computes it."""
        mode, bits, group = _kind(parts, settings)
        width = gcd(bits, WORD)
        fields = unpack(parts.read(".weight", rows).view(torch.int32), width)
        fields = fields.unflatten(-1, (-1, bits // width)) << torch.arange(0, bits, width)
        numbers = fields.sum(-1).unflatten(-1, (-1, group))
        scales = parts.read(".scales", rows)[..., None]
        if mode == "mxfp4":
            signed = torch.tensor([*VALUES, *(-value for value in VALUES)])
            return (signed[numbers] * powers_of_two(scales)).flatten(-2)
        products: Tensor = numbers.to(scales.dtype) * scales
        return products.add(parts.read(".biases", rows)[..., None]).flatten(-2)


Kind = tuple[str, int, int]
"""Mode, bits of a number, and numbers of a group."""


def _kinds(settings: Config, part: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The general settings, and those of layers with ``part`` in their paths."""
    own = (one for path, one in settings.items() if part in path and isinstance(one, dict))
    return map(_stated, (settings, *own))


def _stated(settings: Config) -> tuple[str, Any, Any]:
    """The settings of one layer, or the general ones."""
    return str(settings.get("mode", "affine")), settings.get("bits"), settings.get("group_size")


def _kind(parts: Parts, settings: Config) -> Kind:
    """The settings of a tensor: those of its path, or for an expert the ones that fit its shape."""
    own = settings.get(parts.name.removesuffix(".weight"))
    kinds = {_stated(own)} if isinstance(own, dict) else {*_kinds(settings, STACKED)}
    weight, scales = (parts.shape(suffix) for suffix in (".weight", ".scales"))
    matrices = len(weight) == len(scales) == 2 and weight[0] == scales[0]
    fitting = [
        kind for kind in kinds if matrices and weight[1] * WORD == scales[1] * prod(kind[1:])
    ]
    what = f"weights of shape {list(weight)}, scales of shape {list(scales)} and their settings"
    parts.require(len(fitting) == 1, what)
    return fitting[0]


FORMAT = Mlx()
