"""MXFP4, as in gpt-oss: 4-bit numbers, with a power of two as the scale of every 32 of them.

Open Compute Project, Microscaling Formats (MX) Specification v1.0.
"""

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import powers_of_two, unpack

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 numbers by their lower three bits; the fourth is the sign."""

BYTES = 16
"""Bytes of a block of 32 numbers."""


class Mxfp4(Scheme):
    """See the module."""

    method = "mxfp4"
    title = "MXFP4"
    suffixes = ("_blocks", "_scales")
    suffix = ""
    exact = True

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``; [experts, inputs, outputs]; inputs are the last axis of the files."""
        shape = parts.shape("_blocks")
        parts.check("_blocks", (*shape[:3], BYTES), "U8")
        parts.check("_scales", shape[:3], "U8")
        parts.require(len(shape) == 4, f"blocks of shape {list(shape)} and stacked experts")
        experts, outputs, blocks, _ = shape
        # float16 does not have enough exponents.
        return TensorInfo(
            (experts, 2 * BYTES * blocks, outputs), dtype if dtype != "F16" else "BF16"
        )

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``."""
        blocks, scales = parts.read("_blocks", rows), parts.read("_scales", rows)
        signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=info.torch_dtype)
        pairs = signed[unpack(torch.arange(256, dtype=torch.uint8)[:, None], 4).long()]
        factors = powers_of_two(scales).to(info.torch_dtype)
        numbers = pairs[blocks.int()].flatten(-2) * factors[..., None]
        return numbers.flatten(-2).transpose(1, 2)

    def transformers(self, settings: Config) -> Config:
        """See ``Scheme``."""
        return {"quant_method": self.method, "dequantize": True}


FORMAT = Mxfp4()
