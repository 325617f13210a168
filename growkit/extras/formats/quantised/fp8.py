"""FP8 with a scale for every block, as in DeepSeek-V3 and Qwen3.

DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3: a weight is an E4M3 number times the
scale of its block of 128 by 128 weights.
"""

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import Blocks, powers_of_two

EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two, stored as exponents."""


class Fp8(Scheme):
    """See the module."""

    method = "fp8"
    title = "FP8 in blocks"
    suffixes = (".weight_scale_inv", ".weight")
    unused = (".activation_scale", ".input_scale")

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``."""
        shape = parts.shape(".weight")
        parts.check(".weight", shape, "F8_E4M3", "F8_E5M2")
        scales = parts.shape(".weight_scale_inv")
        parts.check(".weight_scale_inv", scales, "F32", "BF16", "F16", *EXPONENTS)
        _blocks(parts, shape, settings)
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; products in float32."""
        blocks = _blocks(parts, info.shape, settings)
        scales = blocks.read(parts, ".weight_scale_inv", rows)
        scales = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
        return blocks.scale(parts.read(".weight", rows), scales, None, rows)

    def transformers(self, settings: Config) -> Config:
        """See ``Scheme``."""
        block = settings.get("weight_block_size")
        return {"quant_method": self.method, "dequantize": True, "weight_block_size": block}

    def misread(self, parts: Parts, settings: Config) -> str:
        """See ``Scheme``; DeepSeek-V3's own kernel cuts blocks off at the edge."""
        shape = parts.shape(".weight")
        pairs = zip(shape, _blocks(parts, shape, settings), strict=True)
        if all(size <= block or size % block == 0 for size, block in pairs):
            return ""
        return "transformers does not cut blocks off at the edge, as the format does"


def _blocks(parts: Parts, shape: tuple[int, ...], settings: Config) -> Blocks:
    return Blocks.of(parts, ".weight_scale_inv", shape, [settings.get("weight_block_size")])


FORMAT = Fp8()
