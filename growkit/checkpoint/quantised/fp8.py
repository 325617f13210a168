"""FP8 with a scale for every block, as DeepSeek-V3 and Qwen3 are published.

DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3: a weight is a number of E4M3 times the
scale of its block, of 128 by 128 weights.
"""

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.checkpoint.dequantising import REMEDY, Format, Parts, powers_of_two

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
        if len(shape) != 2 or None in _block(shape, scales, settings):
            raise InputError(
                f"tensor {parts.first} in {parts.stored.where(parts.first)} has shape "
                f"{list(scales)}, which are no scales of blocks of {list(shape)} weights; {REMEDY}"
            )
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Format``; float32, the product of both."""
        stored = parts.shape(".weight_scale_inv")
        tall, wide = _block(info.shape, stored, settings)
        assert tall
        assert wide
        begin, end = rows.start // tall, -(-rows.stop // tall)
        where = (slice(begin, end),) if len(stored) == 2 else ()
        scales = parts.read(".weight_scale_inv", *where)
        if scales.dtype == torch.uint8:
            scales = powers_of_two(scales)
        by_row = torch.arange(rows.start, rows.stop) // tall - begin
        scales = scales.float().reshape(end - begin, -1)[by_row].repeat_interleave(wide, 1)
        return parts.read(".weight", rows).float() * scales[:, : info.shape[1]]

    def transformers(self, settings: Config) -> Config:
        """See ``Format``."""
        block = settings.get("weight_block_size")
        return {"quant_method": self.method, "dequantize": True, "weight_block_size": block}


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], settings: Config
) -> tuple[int | None, ...]:
    """Number of rows and of columns that share a scale; None if the scales do not fit."""
    given = settings.get("weight_block_size")
    given = given if isinstance(given, list | tuple) and len(given) == 2 else [None, None]
    counts = scales if len(scales) == 2 else (1, 1)
    if len(scales) != 2 and scales not in ((), (1,)):
        return None, None

    def one(size: int, count: int, block: object) -> int | None:
        if isinstance(block, int) and block > 0 and -(-size // block) == count:
            return block
        return size // count if count and size % count == 0 and size else None

    return tuple(map(one, shape, counts, given))


FORMAT = Fp8()
