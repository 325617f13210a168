"""The source with the tokens alone that its target has, under the target's ids, for the proof."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, TensorInfo, full
from growkit.extras.shrinking.selecting import read_rows
from growkit.extras.shrinking.token_ids import with_new_ids
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import write_json
from growkit.model.checkpoint.reading import Checkpoint, View
from growkit.model.checkpoint.scratch import temporary
from growkit.model.model import Model
from growkit.planning.plan import Lineage, Plan, Tokens

Write = Callable[[Folder], None]
"""Changes copied files; see ``Tokens.write``."""


WITH_LOGITS = "unpadded_vocab_size"
"""The key of the number of tokens that have logits, the first ones; the others fill tables."""


def kept_tokens(kept: Sequence[int], write: Write | None = None) -> Tokens:
    """The tokens of a target that has these tokens of its source alone.

    Args:
        kept: see ``Tokens``.
        write: see ``Tokens``.
    """
    return Tokens(kept, partial(_selected, kept=kept, write=write), write)


def with_tokens(source: Model, kept: Sequence[int]) -> tuple[Config, dict[str, Sequence[int]]]:
    """The config of a model with some tokens alone, and the rows that are left of its tables.

    A table may have rows for the first tokens only, as that of embeddings for each layer has in
    Gemma 3n.
    """
    tables = {axis: size for axis, size in source.sizes.items() if axis.startswith("vocab")}
    left = {axis: kept[: bisect_left(kept, size)] for axis, size in tables.items()}
    sizes = {**source.sizes, **{axis: len(rows) for axis, rows in left.items()}}
    new = {token: index for index, token in enumerate(kept)}
    rows = {
        name: left[axis]
        for name, pattern in source.family.patterns(source.config).items()
        for dimension in pattern.dimensions[:1]
        for axis in dimension.axes & tables.keys()
    }
    config = source.family.resized(with_new_ids(source.config, new), sizes)
    if padded := config.get(WITH_LOGITS):
        config[WITH_LOGITS] = bisect_left(kept, padded)
    return config, rows


@contextmanager
def _selected(source: Checkpoint, kept: Sequence[int], write: Write | None) -> Iterator[Checkpoint]:
    from growkit.engine.written_config import config_to_write  # imports torch

    planned, rows = with_tokens(source, kept)
    with temporary("tokens") as folder:
        for name in {*source.opened.carried(), *source.opened.code()}:
            source.opened.copy(name, folder)
        config = config_to_write(Lineage(source, [Plan(planned, ())]))
        write_json(folder / "config.json", config)
        beside = Folder(folder)
        if write:
            write(beside)
        yield Selection(source, rows, config, beside)


class Selection(View):
    """A checkpoint in which some tensors have fewer rows.

    Args:
        stored: the checkpoint.
        rows: the indices of the rows that are left, in ascending order, by tensor.
        config: the contents of its ``config.json``.
        beside: a folder with the files that belong next to it.
    """

    def __init__(
        self, stored: Checkpoint, rows: Mapping[str, Sequence[int]], config: Config, beside: Folder
    ) -> None:
        super().__init__(stored)
        self.stands_alone = False
        self.config = self.published = config
        self.opened, self._rows = beside, rows
        self.tensors = dict(stored.tensors)
        for name, left in rows.items():
            info = stored.tensors[name]
            self.tensors[name] = TensorInfo((len(left), *info.shape[1:]), info.dtype)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Checkpoint``."""
        if name not in self._rows:
            return self.stored.read(name, *where)
        rows, *others = full(self.tensors[name].shape, where)
        return read_rows(self.stored, name, self._rows[name][rows], others)
