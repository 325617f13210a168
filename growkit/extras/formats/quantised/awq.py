"""AWQ: 4-bit integers, with a scale and a zero for every group of inputs.

arXiv 2306.00978; the layout "gemm" of AutoAWQ (https://github.com/casper-hansen/AutoAWQ).
"""

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import Blocks, unpack

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place within a word of each of eight consecutive outputs."""

BITS = 4


class Awq(Scheme):
    """See the module."""

    method = "awq"
    title = "AWQ"
    suffixes = (".qweight", ".qzeros", ".scales")

    def unread(self, settings: Config) -> str:
        """See ``Scheme``."""
        bits = settings.get("bits", settings.get("w_bit"))
        if bits != BITS:
            return f"bits {bits!r}"
        version = str(settings.get("version") or settings.get("format") or "gemm")
        return "" if version.lower() == "gemm" else f"version {version!r}"

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``; weights have the dtype of the scales."""
        inputs, words = (*parts.shape(".qweight"), 0, 0)[:2]
        parts.check(".qweight", (inputs, words), "I32")
        groups = (*parts.shape(".scales"), 0)[0]
        scales_dtype = parts.check(".scales", (groups, words * len(ORDER)), "F16", "BF16", "F32")
        parts.check(".qzeros", (groups, words), "I32")
        parts.require(bool(groups) and inputs % groups == 0, f"{inputs} inputs and {groups} groups")
        return TensorInfo((words * len(ORDER), inputs), scales_dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; rows are stored as columns."""
        words = slice(rows.start // len(ORDER), -(-rows.stop // len(ORDER)))
        first = rows.start - words.start * len(ORDER)
        wanted = slice(first, first + rows.stop - rows.start)

        def numbers(suffix: str) -> Tensor:
            unpacked: Tensor = unpack(parts.read(suffix, None, words), BITS)
            places = torch.arange(unpacked.shape[1]).view(-1, len(ORDER))[:, ORDER].flatten()
            return unpacked[:, places[wanted]].T

        scales = parts.read(".scales", None, rows).T
        blocks = Blocks(1, info.shape[1] // scales.shape[1])
        return blocks.scale(numbers(".qweight"), scales, numbers(".qzeros"), rows)


FORMAT = Awq()
