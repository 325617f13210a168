"""NF4 and FP4 of bitsandbytes: indices into a table of 16 numbers, with a scale for every block.

QLoRA, arXiv 2305.14314, section 3. With double quantisation, scales are quantised as well: indices
into a table of 256 numbers, with a scale for every larger block, and an offset.
https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from math import prod

from growkit.base.lazy import Tensor, torch
from growkit.base.parsing import parse_json
from growkit.base.tensors import TORCH_NAMES, Config, TensorInfo
from growkit.extras.formats.dequantising import Parts, Scheme
from growkit.extras.formats.quantised.blocks import unpack

STATE = ".weight.quant_state.bitsandbytes__"
"""Prefix of the suffixes of tensors that hold the size of blocks and the shape, as JSON."""

MAX_STATE = 1 << 12
"""Largest size of this JSON in bytes."""


class Bitsandbytes4bit(Scheme):
    """See the module."""

    method = "bitsandbytes"
    title = "bitsandbytes in 4 bits"
    suffixes = (
        *(".weight.absmax", ".weight", ".weight.quant_map", ".weight.nested_absmax"),
        *(".weight.nested_quant_map", f"{STATE}nf4", f"{STATE}fp4"),
    )

    def applies(self, settings: Config) -> bool:
        """See ``Scheme``; older settings do not name the method."""
        named = super().applies({"quant_method": self.method} | settings)
        return named and bool(settings.get("load_in_4bit"))

    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """See ``Scheme``."""
        state = _state(parts)
        rows, columns = state["shape"]
        blocks = -(-rows * columns // state["blocksize"])
        parts.check(".weight", (-(-rows * columns // 2), 1), "U8")
        parts.check(".weight.quant_map", (16,), "F32")
        if "nested_blocksize" in state:
            parts.check(".weight.absmax", (blocks,), "U8")
            parts.check(".weight.nested_absmax", (-(-blocks // state["nested_blocksize"]),), "F32")
            parts.check(".weight.nested_quant_map", (256,), "F32")
        else:
            parts.check(".weight.absmax", (blocks,), "F32")
        return TensorInfo((rows, columns), dtype)

    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """See ``Scheme``; numbers have the original dtype, as bitsandbytes computes them."""
        state, columns = _state(parts), info.shape[1]
        start, end = rows.start * columns, rows.stop * columns
        stored = parts.read(".weight", slice(start // 2, -(-end // 2))).flatten()
        # The first number of a byte is in the higher bits.
        pairs = unpack(torch.arange(256, dtype=torch.uint8)[:, None], 4).flip(-1)
        pairs = parts.read(".weight.quant_map")[pairs.int()]
        numbers = pairs[stored.int()].flatten()[start % 2 :][: end - start]
        size = state["blocksize"]
        scales = _scales(parts, state, slice(start // size, -(-end // size)))
        numbers *= scales.repeat_interleave(size)[start % size :][: end - start]
        return numbers.to(state["dtype"]).view(-1, columns)


def _scales(parts: Parts, state: Config, blocks: slice) -> Tensor:
    """Read the scales of some blocks, in float32."""
    scales = parts.read(".weight.absmax", blocks)
    if scales.dtype != torch.uint8:
        return scales
    size = state["nested_blocksize"]
    outer = torch.arange(blocks.start, blocks.stop) // size
    scales = parts.read(".weight.nested_quant_map")[scales.int()]
    scales *= parts.read(".weight.nested_absmax")[outer]
    return scales.add(state["nested_offset"])


def _state(parts: Parts) -> Config:
    """Read the shape, the dtype and the sizes of blocks of a tensor."""
    (name, *_), what = [name for name in parts.names if name.startswith(STATE)] or [""], "its state"
    size = prod(parts.shape(name))
    parts.require(bool(name) and size <= MAX_STATE, what)
    parts.check(name, (size,), "U8")
    try:
        state = parse_json(bytes(parts.read(name).tolist()))
    except ValueError:
        state = None
    match state:
        case {"shape": [int(rows), int(columns)], "blocksize": int(size), "dtype": str(dtype)}:
            fits = min(rows, columns) >= 0 and size > 0 and dtype in TORCH_NAMES.values()
            fields: Config = {"shape": (rows, columns), "blocksize": size}
        case _:
            fits, fields = False, {}
    parts.require(fits, what)
    fields["dtype"] = getattr(torch, state["dtype"])
    match state:
        case {"nested_blocksize": int(size), "nested_offset": float(offset)}:
            parts.require(size > 0, what)
            fields |= {"nested_blocksize": size, "nested_offset": offset}
    return fields


FORMAT = Bitsandbytes4bit()
