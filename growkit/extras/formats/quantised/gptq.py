"""GPTQ: integers of 2, 4 or 8 bits, with a scale and a zero for every group of inputs.

arXiv 2210.17323; the layout of AutoGPTQ and GPTQModel (https://github.com/ModelCloud/GPTQModel).
"""

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import scale, unpack

WORD = 32
"""Bits of the words into which numbers are packed."""

FORMATS = ("gptq", "gptq_v2")
"""Values of ``checkpoint_format`` that growkit reads; the first stores zeros minus one."""


class Gptq(Scheme):
    """See the module."""

    method = "gptq"
    title = "GPTQ"
    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def unread(self, settings: Config) -> str:
        """See ``Scheme``."""
        bits = settings.get("bits")
        if type(bits) is not int or bits not in (2, 4, 8):
            return f"bits {bits!r}"
        form = settings.get("checkpoint_format") or FORMATS[0]
        return "" if form in FORMATS else f"checkpoint_format {form!r}"

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``; weights have the dtype of the scales."""
        per_word = WORD // settings["bits"]
        words, outputs = (*parts.shape(".qweight"), 0, 0)[:2]
        parts.check(".qweight", (words, outputs), "I32")
        groups = (*parts.shape(".scales"), 0)[0]
        scales_dtype = parts.check(".scales", (groups, outputs), "F16", "BF16", "F32")
        parts.check(".qzeros", (groups, -(-outputs // per_word)), "I32")
        parts.check(".g_idx", (words * per_word,), "I32", "I64")
        return TensorInfo((outputs, words * per_word), scales_dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; rows are stored as columns."""
        bits = settings["bits"]
        per_word = WORD // bits
        numbers = unpack(parts.read(".qweight", None, rows).T.contiguous(), bits)
        words = slice(rows.start // per_word, -(-rows.stop // per_word))
        zeros = parts.read(".qzeros", None, words)
        if (settings.get("checkpoint_format") or FORMATS[0]) == FORMATS[0]:
            # Add one to every number of a word, with a carry, as GPTQModel does.
            zeros = zeros + sum(1 << place for place in range(0, WORD, bits))
        first = rows.start - words.start * per_word
        zeros = unpack(zeros, bits)[:, first : first + rows.stop - rows.start]
        groups = parts.read(".g_idx").long()
        inside = bool(((groups >= 0) & (groups < len(zeros))).all())
        parts.require(inside, f"g_idx and {len(zeros)} groups")
        every = torch.arange(rows.stop - rows.start)
        return scale(numbers, parts.read(".scales", None, rows).T, zeros.T, every, groups)


FORMAT = Gptq()
