"""Numbers of few bits, and blocks of a matrix that share a scale, for several formats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from growkit.base.lazy import Tensor, torch
from growkit.extras.formats.dequantising import Parts


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers from words; the first number is in the lowest bits of a word.

    Args:
        words: integers, [..., words].
        bits: bits of a number; a divisor of the bits of a word.

    Returns:
        Integers, [..., words · bits of a word // bits].
    """
    shifts = torch.arange(0, 8 * words.element_size(), bits, dtype=words.dtype)
    numbers: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


class Blocks(NamedTuple):
    """Blocks of a matrix that share a scale.

    Attributes:
        tall: rows of a block.
        wide: columns of a block.
    """

    tall: int
    wide: int

    @classmethod
    def of(
        cls, parts: Parts, suffix: str, shape: tuple[int, ...], known: Iterable[object]
    ) -> Blocks:
        """Derive the size of blocks from the shape of their scales.

        Args:
            parts: the stored tensors.
            suffix: suffix of the scales.
            shape: shape of the matrix.
            known: sizes of blocks in the settings, each a list of rows and columns; other blocks
                must divide rows evenly.

        Raises:
            InputError: the scales do not fit the matrix.
        """
        scales = parts.shape(suffix)
        what = f"weights of shape {list(shape)} and scales of shape {list(scales)}"
        several = len(scales) == 2 and 0 not in scales
        parts.require(len(shape) == 2 and (several or scales in ((), (1,))), what)
        rows, columns = (max(size, 1) for size in shape)
        for size in known if several else ():
            match size:
                case [int(tall), int(wide)] if tall > 0 and wide > 0:
                    if (-(-rows // tall), -(-columns // wide)) == scales:
                        return cls(tall, wide)
        down, across = scales if several else (1, 1)
        parts.require(rows % down == columns % across == 0, what)
        return cls(rows // down, columns // across)

    def span(self, rows: slice) -> slice:
        """The rows of blocks that contain rows of the matrix."""
        return slice(rows.start // self.tall, -(-rows.stop // self.tall))

    def read(self, parts: Parts, suffix: str, rows: slice) -> Tensor:
        """Read a number for every block, [rows of blocks, columns of blocks]."""
        span = self.span(rows)
        where = [span][: len(parts.shape(suffix)) - 1]
        return parts.read(suffix, *where).reshape(span.stop - span.start, -1)

    def scale(
        self,
        numbers: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        rows: slice,
        by_column: Tensor | None = None,
    ) -> Tensor:
        """Dequantise some rows of the matrix; see ``scale``; columns are in order by default."""
        by_row = torch.arange(rows.start, rows.stop) // self.tall - self.span(rows).start
        if by_column is None:
            by_column = torch.arange(numbers.shape[1]) // self.wide
        return scale(numbers, scales, zeros, by_row, by_column)


def scale(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, by_row: Tensor, by_column: Tensor
) -> Tensor:
    """Compute (number - zero) · scale, in the dtype of the scales.

    Args:
        numbers: [rows, columns].
        scales: [row groups, column groups].
        zeros: zeros, of the same shape as the scales; None for none.
        by_row: index of the row group of every row.
        by_column: index of the column group of every column.
    """

    def spread(values: Tensor) -> Tensor:
        return values.to(scales.dtype)[by_row][:, by_column]

    converted = numbers.to(scales.dtype)
    return (converted if zeros is None else converted - spread(zeros)) * spread(scales)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Compute 2^(e - 127) for exponents of a byte each (E8M0), in float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
