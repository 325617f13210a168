"""compressed-tensors: integers of some bits, packed or not, or FP8, times scales.

https://github.com/vllm-project/compressed-tensors; scales are for a tensor, a row, groups of a row
or blocks. Which one is seen from their shape, so that patterns of names in the settings, which
anybody may have written, are never run.
"""

from collections.abc import Iterator

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo
from growkit.checkpoint.dequantising import Format, Parts, scaled, unpacked

FORMATS = (
    *("dense", "mixed-precision", "naive-quantized", "int-quantized", "float-quantized"),
    "pack-quantized",
)
"""Values of ``format`` that are read."""

WORD = 32
"""Bits of the words into which numbers are packed."""

BITS = (2, 4, 8)
"""Bits of packed numbers; those that do not fill a word were packed in several ways."""


class CompressedTensors(Format):
    """See the module."""

    method = "compressed-tensors"
    title = "compressed-tensors"
    suffixes = (
        *(".weight_scale", ".weight_packed", ".weight", ".weight_shape", ".weight_zero_point"),
    )
    unused = tuple(
        f".{of}_{kind}"
        for of in ("input", "output", "k", "v", "q")
        for kind in ("scale", "zero_point", "global_scale")
    )

    def applies(self, settings: Config) -> bool:
        """See ``Format``; old settings do not name the method."""
        return super().applies(settings) or (
            "quant_method" not in settings and "config_groups" in settings
        )

    def unread(self, settings: Config) -> str:
        """See ``Format``."""
        for each in (settings, *_groups(settings)):
            if each.get("format") not in (None, *FORMATS):
                return f"format {each['format']!r}"
        for key in ("sparsity_config", "transform_config"):
            value = settings.get(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                return f"with {key}"
        return ""

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Format``."""
        if ".weight_packed" in parts:
            parts.check(".weight_shape", (2,), "I32", "I64")
            rows, columns = shape = tuple(parts.read(".weight_shape").tolist())
            bits = _bits(parts, columns, settings)
            parts.check(".weight_packed", (rows, -(-columns * bits // WORD)), "I32")
        else:
            shape = parts.shape(".weight") if ".weight" in parts else ()
            parts.check(".weight", shape, "I8", "F8_E4M3")
        scales = parts.shape(".weight_scale")
        parts.check(".weight_scale", scales, "F32", "BF16", "F16")
        fits = len(shape) == 2 and _block(shape, scales, settings) is not None
        parts.require(fits, f"weights of shape {list(shape)} and scales of shape {list(scales)}")
        if ".weight_zero_point" in parts and ".weight_packed" in parts:
            parts.check(".weight_zero_point", (-(-shape[0] * bits // WORD), *scales[1:]), "I32")
        elif ".weight_zero_point" in parts:
            parts.check(".weight_zero_point", scales, "I8", "F8_E4M3")
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Format``; in the dtype of the scales."""
        shape = parts.shape(".weight_scale")
        block = _block(info.shape, shape, settings)
        assert block
        tall, wide = block
        begin, end = rows.start // tall, -(-rows.stop // tall)
        where = [slice(begin, end)][: len(shape) - 1]
        scales = parts.read(".weight_scale", *where).reshape(end - begin, -1)
        zeros = None
        if ".weight_packed" in parts:
            bits = _bits(parts, info.shape[1], settings)
            numbers = _signed(parts.read(".weight_packed", rows), bits)
            if ".weight_zero_point" in parts:  # packed along rows, which have scales of their own
                step = WORD // bits
                words = slice(begin // step, -(-end // step))
                zeros = _signed(parts.read(".weight_zero_point", words).T.contiguous(), bits)
                zeros = zeros.T[begin - step * words.start :][: end - begin]
        else:
            numbers = parts.read(".weight", rows)
            if ".weight_zero_point" in parts:
                zeros = parts.read(".weight_zero_point", *where).reshape(end - begin, -1)
        by_row = torch.arange(rows.start, rows.stop) // tall - begin
        by_column = torch.arange(info.shape[1]) // wide
        return scaled(numbers[:, : info.shape[1]], scales, zeros, by_row, by_column)

    def transformers(self, settings: Config) -> Config:
        """See ``Format``."""
        kept: Config = {k: settings[k] for k in ("format", "config_groups") if k in settings}
        return {**kept, "quant_method": self.method, "dequantize": True}


def _groups(settings: Config) -> Iterator[Config]:
    """What the settings say of each group of modules."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group


def _weights(settings: Config, key: str) -> list[object]:
    """What the settings say under a key of the weights of all groups."""
    each = (group.get("weights") for group in _groups(settings))
    return [weights.get(key) for weights in each if isinstance(weights, dict)]


def _bits(parts: Parts, columns: int, settings: Config) -> int:
    """Bits of packed numbers: those in the settings with which rows have this many columns."""
    words = sum(parts.shape(".weight_packed")[-1:])
    for bits in BITS:
        if bits in _weights(settings, "num_bits") and -(-columns * bits // WORD) == words:
            return bits
    given = " or ".join(sorted({str(each) for each in _weights(settings, "num_bits")}))
    parts.require(False, f"{words} words for {columns} columns of {given} bits")
    raise AssertionError


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], settings: Config
) -> tuple[int, int] | None:
    """Number of rows and of columns that share a scale; None if the scales do not fit."""
    rows, columns = shape
    if scales in ((), (1,), (1, 1)):
        return max(rows, 1), max(columns, 1)
    if len(scales) != 2 or 0 in scales:
        return None
    if scales[0] == rows and columns % scales[1] == 0:
        return 1, columns // scales[1]
    for block in _weights(settings, "block_structure"):
        match block:
            case [int(tall), int(wide)] if tall > 0 and wide > 0:
                if (-(-rows // tall), -(-columns // wide)) == scales:
                    return tall, wide
    return None


def _signed(words: Tensor, bits: int) -> Tensor:
    """Numbers with a sign, of which the least is stored as zero."""
    return unpacked(words, bits).sub(2 ** (bits - 1))


FORMAT = CompressedTensors()
