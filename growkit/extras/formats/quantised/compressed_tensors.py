"""compressed-tensors: integers of 2, 4 or 8 bits, packed or not, or FP8, with scales.

A scale serves a tensor, a row, a group within a row, or a block. Which of these is derived from the
shape of the scales, so that untrusted patterns of names in the settings are never run.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Iterator

from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import Blocks, unpack

FORMATS = (
    *("dense", "mixed-precision", "naive-quantized", "int-quantized", "float-quantized"),
    "pack-quantized",
)
"""Values of ``format`` that growkit reads."""

WORD = 32
"""Bits of the words into which numbers are packed."""

BITS = (2, 4, 8)
"""Bits of packed numbers; other numbers of bits were packed in several ways."""


class CompressedTensors(Scheme):
    """See the module."""

    method = "compressed-tensors"
    title = "compressed-tensors"
    suffixes = (
        *(".weight_scale", ".weight_packed", ".weight", ".weight_shape", ".weight_zero_point"),
        ".weight_g_idx",
    )
    unused = tuple(
        f".{of}_{kind}"
        for of in ("input", "output", "k", "v", "q")
        for kind in ("scale", "zero_point", "global_scale")
    )

    def applies(self, settings: Config) -> bool:
        """See ``Scheme``; older settings do not name the method."""
        return super().applies(settings) or (
            "quant_method" not in settings and "config_groups" in settings
        )

    def unread(self, settings: Config) -> str:
        """See ``Scheme``."""
        for group in (settings, *_groups(settings)):
            if group.get("format") not in (None, *FORMATS):
                return f"format {group['format']!r}"
        for key in ("sparsity_config", "transform_config"):
            value = settings.get(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                return f"with {key}"
        return ""

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``."""
        if ".weight_packed" in parts:
            parts.check(".weight_shape", (2,), "I32", "I64")
            rows, columns = shape = tuple(parts.read(".weight_shape").tolist())
            bits = _bits(parts, columns, settings)
            parts.check(".weight_packed", (rows, -(-columns * bits // WORD)), "I32")
        else:
            shape = parts.shape(".weight")
            parts.check(".weight", shape, "I8", "F8_E4M3")
        scales = parts.shape(".weight_scale")
        parts.check(".weight_scale", scales, "F32", "BF16", "F16")
        blocks = _blocks(parts, shape, settings)
        declared = [blocks.tall, blocks.wide] in _weights(settings, "block_structure")
        declared |= blocks.tall == 1 or scales in ((), (1,), (1, 1))
        parts.require(declared, f"weights of shape {list(shape)} and scales of {list(scales)}")
        if ".weight_zero_point" in parts and ".weight_packed" in parts:
            parts.check(".weight_zero_point", (-(-shape[0] * bits // WORD), *scales[1:]), "I32")
        elif ".weight_zero_point" in parts:
            parts.check(".weight_zero_point", scales, "I8", "F8_E4M3")
        if ".weight_g_idx" in parts:
            parts.check(".weight_g_idx", shape[1:], "I32", "I64")
        return TensorInfo(shape, dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; in the dtype of the scales."""
        blocks, zeros = _blocks(parts, info.shape, settings), None
        scales = blocks.read(parts, ".weight_scale", rows)
        if ".weight_packed" in parts:
            bits = _bits(parts, info.shape[1], settings)
            numbers = _signed(parts.read(".weight_packed", rows), bits)
            if ".weight_zero_point" in parts:  # packed along rows of blocks
                step, span = WORD // bits, blocks.span(rows)
                words = slice(span.start // step, -(-span.stop // step))
                zeros = _signed(parts.read(".weight_zero_point", words).T.contiguous(), bits)
                zeros = zeros.T[span.start - step * words.start :][: span.stop - span.start]
        else:
            numbers = parts.read(".weight", rows)
            if ".weight_zero_point" in parts:
                zeros = blocks.read(parts, ".weight_zero_point", rows)
        groups = _groups_of_columns(parts, scales.shape[-1])
        return blocks.scale(numbers[:, : info.shape[1]], scales, zeros, rows, groups)

    def transformers(self, settings: Config) -> Config:
        """See ``Scheme``."""
        kept: Config = {k: settings[k] for k in ("format", "config_groups") if k in settings}
        return {**kept, "quant_method": self.method, "dequantize": True}


def _groups(settings: Config) -> Iterator[Config]:
    """The settings of each group of modules."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group


def _weights(settings: Config, key: str) -> list[object]:
    """The value of a key for the weights of each group."""
    entries = (group.get("weights") for group in _groups(settings))
    return [weights.get(key) for weights in entries if isinstance(weights, dict)]


def _bits(parts: Parts, columns: int, settings: Config) -> int:
    """Bits of packed numbers: the number in the settings that fits the stored shape."""
    words = sum(parts.shape(".weight_packed")[-1:])
    for bits in BITS:
        if bits in _weights(settings, "num_bits") and -(-columns * bits // WORD) == words:
            return bits
    widths = " or ".join(sorted({str(width) for width in _weights(settings, "num_bits")}))
    parts.require(False, f"{words} words for {columns} columns of {widths} bits")
    raise AssertionError


def _blocks(parts: Parts, shape: tuple[int, ...], settings: Config) -> Blocks:
    return Blocks.of(parts, ".weight_scale", shape, _weights(settings, "block_structure"))


def _groups_of_columns(parts: Parts, count: int) -> Tensor | None:
    """The group of every column where columns are not in order; all are -1 where they are."""
    groups = parts.read(".weight_g_idx").long() if ".weight_g_idx" in parts else None
    if groups is None or bool((groups == -1).all()):
        return None
    inside = bool(((groups >= 0) & (groups < count)).all())
    parts.require(inside, f"weight_g_idx and {count} groups")
    return groups


def _signed(words: Tensor, bits: int) -> Tensor:
    """Unpack signed numbers; the least of them is stored as zero."""
    return unpack(words, bits).sub(2 ** (bits - 1))


FORMAT = CompressedTensors()
