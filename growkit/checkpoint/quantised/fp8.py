"""FP8 with a scale for every block, as DeepSeek-V3 and Qwen3 are published.

DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3: a weight is a number of E4M3 times the
scale of its block, of 128 by 128 weights.
"""

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.checkpoint.dequantising import Format, Parts, powers_of_two, scaled

EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two, of which the exponent is stored."""


class Fp8(Format):
    """See the module."""

    method = "fp8"
    title = "FP8 in blocks"
    suffixes = (".weight_scale_inv", ".weight")
    unused = (".activation_scale", ".input_scale")

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Format``."""
        shape = parts.shape(".weight") if ".weight" in parts else ()
        parts.check(".weight", shape, "F8_E4M3", "F8_E5M2")
        scales = parts.shape(".weight_scale_inv")
        parts.check(".weight_scale_inv", scales, "F32", "BF16", "F16", *EXPONENTS)
        fits = len(shape) == 2 and _block(shape, scales, settings) is not None
        parts.require(fits, f"weights of shape {list(shape)} and scales of shape {list(scales)}")
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Format``; float32, the product of both."""
        shape = parts.shape(".weight_scale_inv")
        block = _block(info.shape, shape, settings)
        assert block
        tall, wide = block
        begin, end = rows.start // tall, -(-rows.stop // tall)
        scales = parts.read(".weight_scale_inv", *[slice(begin, end)][: len(shape) - 1])
        scales = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
        by_row = torch.arange(rows.start, rows.stop) // tall - begin
        by_column = torch.arange(info.shape[1]) // wide
        scales = scales.reshape(end - begin, -1)
        return scaled(parts.read(".weight", rows), scales, None, by_row, by_column)

    def transformers(self, settings: Config) -> Config:
        """See ``Format``."""
        block = settings.get("weight_block_size")
        return {"quant_method": self.method, "dequantize": True, "weight_block_size": block}


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], settings: Config
) -> tuple[int, int] | None:
    """Number of rows and of columns that share a scale; None if the scales do not fit."""
    rows, columns = (max(size, 1) for size in shape)
    if scales in ((), (1,), (1, 1)):
        return rows, columns
    if len(scales) != 2 or 0 in scales:
        return None
    match settings.get("weight_block_size"):
        case [int(tall), int(wide)] if tall > 0 and wide > 0:
            if (-(-rows // tall), -(-columns // wide)) == scales:
                return tall, wide
    fits = rows % scales[0] == 0 and columns % scales[1] == 0
    return (rows // scales[0], columns // scales[1]) if fits else None


FORMAT = Fp8()
