"""Logits that another program computed, in a file: safetensors, or JSON of the same names.

``docs/how-to/same-model.md`` describes the file for those who write it. It is not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.limits import SPACING
from growkit.base.names import did_you_mean
from growkit.base.tensors import INTEGERS, TORCH_NAMES, TensorInfo, cut
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.weight_file import open_weights
from growkit.model.checkpoint.writing import sha256
from growkit.results.proof_result import counted

TEXTS = ("program", "dtype")
"""Texts: the metadata of safetensors, or keys of JSON."""

HIDDEN = re.compile(r"hidden\.(0|[1-9]\d{0,3})")
"""Hidden states that a layer gets; behind the last layer, those that the last norm gets."""

SHAPES = {
    "ids": ("sequences", "tokens"),
    "positions": ("rows",),
    "logits": ("sequences", "rows", "vocabulary"),
    "top_ids": ("sequences", "rows", "k"),
    "top_logprobs": ("sequences", "rows", "k"),
    "hidden.N": ("sequences", "tokens", "hidden"),
}
"""Axes of every tensor; the first may be missing, for one sequence."""

REMEDY = "write it again, with finite numbers: logits as they are before tokens are masked"

WHOLE = ("ids", "positions", "top_ids")
"""Tensors of whole numbers."""


UNKNOWN = -9999.0
"""What servers write in place of a log-probability that they do not have."""

NARROW = ("bfloat16", "float16")
DECIMALS = {counted(places, "decimal"): places for places in range(7)}
"""To what programs round the numbers that they write. All numbers of the narrow dtypes have few
decimals as well, so these are tried first."""

Columns = Tensor | slice
"""Tokens of columns: for every row, [rows, columns]; or the first of the vocabulary, over which
log-probabilities are normalised."""


class LogitsFile:
    """Logits, or log-probabilities of some tokens, that a program computed for sequences of tokens.

    Args:
        path: the file.

    Attributes:
        path: the file.
        sha256: its hash.
        program: name of the program.
        dtype: torch name of the dtype in which it computed.
        ids: token ids, [sequences, tokens].
        positions: positions in every sequence whose logits are there, [rows].
        columns: number of logits, or of log-probabilities, of a position.
        hidden: numbers of the layers whose inputs are there; see ``HIDDEN``.

    Raises:
        InputError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        texts, self._tensors, self._read = _open(path)
        self.program, self.dtype = (self._text(texts, name) for name in TEXTS)
        if self.dtype not in SPACING:
            raise InputError(
                f"dtype in {path} is {self.dtype!r}; the dtype in which the program computes was "
                f"expected, one of {', '.join(SPACING)}"
            )
        sizes = self._sizes()
        self.ids = self._all("ids", 2)
        rows = sizes.setdefault("rows", sizes["tokens"])
        self.positions = torch.arange(rows)
        if "positions" in self._tensors:
            self.positions = self._all("positions", 1)
        elif rows != sizes["tokens"]:
            raise InputError(
                f"{path} has {sizes['tokens']} ids and {rows} rows of logits in a sequence; name "
                "the position of every row in positions"
            )
        self._check_range("positions", self.positions, sizes["tokens"])
        self.columns = sizes["vocabulary" if "logits" in self._tensors else "k"]
        numbers = (HIDDEN.fullmatch(name) for name in self._tensors)
        self.hidden = sorted(int(number[1]) for number in numbers if number)
        self.sha256 = sha256(path)

    @property
    def only_top(self) -> bool:
        """Whether there are log-probabilities of some tokens in place of all logits."""
        return "logits" not in self._tensors

    @cached_property
    def rounded_to(self) -> str:
        """To what the numbers are rounded, of ``NARROW`` or ``DECIMALS``; empty for nothing."""
        name = "top_logprobs" if self.only_top else "logits"
        possible = [*NARROW, *DECIMALS]
        for sequence, row in product(range(len(self.ids)), range(len(self.positions))):
            stored = self._part(name, sequence, slice(row, row + 1))
            numbers = stored[stored.isfinite()]
            possible = [to for to in possible if _rounded(numbers, to).equal(numbers)]
        return possible[0] if possible else ""

    def as_written(self, numbers: Tensor) -> Tensor:
        """Round numbers as those of the file are."""
        return _rounded(numbers, self.rounded_to)

    def spacing(self, scale: float) -> float:
        """Spacing of the numbers, relative to their scale; 0 if they are not rounded."""
        if self.rounded_to in DECIMALS:
            return 10.0 ** -DECIMALS[self.rounded_to] / scale if scale else 0.0
        return SPACING.get(self.rounded_to, 0.0)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse ids that a vocabulary does not have.

        Raises:
            InputError: an id is not in the vocabulary.
        """
        self._check_range("ids", self.ids, vocabulary)
        if self.only_top:
            self._check_range("top_ids", self._all("top_ids", 3), vocabulary)

    def log_probabilities(
        self, sequence: int, rows: slice, vocabulary: int
    ) -> tuple[Tensor, Columns]:
        """Log-probabilities at some positions of a sequence, in float64.

        Args:
            sequence: number of the sequence.
            rows: numbers of the positions.
            vocabulary: number of tokens of the source; further ones are left out.

        Returns:
            The log-probabilities, [rows, columns], and the tokens of these columns.
        """
        if self.only_top:
            logs = self._part("top_logprobs", sequence, rows).double()
            if (logs > SPACING[self.dtype]).any():
                raise InputError(
                    f"top_logprobs in {self.path} has {float(logs.amax()):.3g}; natural logarithms "
                    "of probabilities were expected, none above 0"
                )
            if (logs <= UNKNOWN).any():
                raise InputError(
                    f"top_logprobs in {self.path} has {float(logs.amin()):g}, by which servers say "
                    "that they have none; write fewer tokens in each row"
                )
            return logs, self._part("top_ids", sequence, rows).long()
        logits = self._part("logits", sequence, rows)[:, :vocabulary].double()
        return logits.log_softmax(-1), slice(logits.shape[-1])

    def states(self, number: int, sequence: int) -> Tensor:
        """The states that a layer gets in a sequence, [tokens, hidden], in float64."""
        return self._part(f"hidden.{number}", sequence, slice(None)).double()

    def _text(self, texts: Mapping[str, Any], name: str) -> str:
        text = texts.get(name)
        if not isinstance(text, str) or not text:
            raise InputError(f"{self.path} has no {name}; write it into the file, as a text")
        return text

    def _sizes(self) -> dict[str, int]:
        """Sizes of all axes; every tensor has those that its name implies."""
        sizes: dict[str, int] = {}
        names = "ids and logits, or ids, top_ids and top_logprobs"
        both = {"top_ids", "top_logprobs"}
        if "ids" not in self._tensors or ("logits" in self._tensors) == (both <= {*self._tensors}):
            raise InputError(f"{self.path} needs {names}")
        for name, info in self._tensors.items():
            kind = "hidden.N" if HIDDEN.fullmatch(name) else name
            if kind not in SHAPES:
                raise InputError(
                    f"{self.path} has an unknown tensor {name!r}; {did_you_mean(name, SHAPES)}"
                )
            axes = SHAPES[kind]
            if len(info.shape) == len(axes) - 1 and axes[0] == "sequences":
                axes = axes[1:]
            wanted = INTEGERS if kind in WHOLE else TORCH_NAMES
            fits = len(info.shape) == len(axes) and info.dtype in wanted and info.elements
            sequences = () if "sequences" in axes or kind == "positions" else (("sequences", 1),)
            for axis, size in (*zip(axes, info.shape, strict=False), *sequences):
                fits = fits and sizes.setdefault(axis, size) == size
            if not fits:
                raise InputError(
                    f"{name} in {self.path} is {info.dtype} {list(info.shape)}; "
                    f"{'whole' if kind in WHOLE else 'floating-point'} numbers were expected, "
                    f"[{', '.join(axes)}], as many as the other tensors have"
                )
        return sizes

    def _all(self, name: str, dimensions: int) -> Tensor:
        tensor = self._read(name).long()
        return tensor if tensor.dim() == dimensions else tensor[None]

    def _part(self, name: str, sequence: int, rows: slice) -> Tensor:
        if len(self._tensors[name].shape) == 2:
            return self._read(name, rows)
        return self._read(name, slice(sequence, sequence + 1), rows)[0]

    def _check_range(self, name: str, numbers: Tensor, end: int) -> None:
        if int(numbers.min()) < 0 or int(numbers.max()) >= end:
            raise InputError(
                f"{name} in {self.path} are {int(numbers.min())} to {int(numbers.max())}; "
                f"0 to {end - 1} were expected"
            )


def _rounded(numbers: Tensor, to: str) -> Tensor:
    if to in NARROW:
        return numbers.to(getattr(torch, to)).to(numbers.dtype)
    wide = numbers.double()
    return (wide.round(decimals=DECIMALS[to]) if to else wide).to(numbers.dtype)


Contents = tuple[Mapping[str, Any], Mapping[str, TensorInfo], Callable[..., Tensor]]
"""Texts, headers of tensors, and a function that reads a part of a tensor."""


def _open(path: Path) -> Contents:
    folder = Folder(path.parent)
    if not folder.has(path.name):
        raise InputError(f"{path} does not exist; give a file with the logits of a program")
    if path.suffix != ".json":
        file = open_weights(folder, path.name)
        return file.metadata, file.tensors, file.read
    content = folder.json(path.name, remedy=REMEDY)
    tensors = {}
    for name, value in content.items():
        if name not in TEXTS:
            try:
                kind = torch.int64 if name in WHOLE else torch.float64
                tensors[name] = torch.tensor(value, dtype=kind)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(
                    f"{name} in {path} is not an array of numbers, with rows of the same length"
                ) from None
    infos = {
        name: TensorInfo.of_torch(tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }
    return content, infos, partial(_part_of, tensors)


def _part_of(tensors: Mapping[str, Tensor], name: str, *where: slice | None) -> Tensor:
    return cut(tensors[name], where)
