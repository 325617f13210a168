"""The weights of an output, written and looked at by one process or shared out among ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from growkit.checkpoint.distributed_writing import distributed_shards, write_list
from growkit.checkpoint.journal import Finished, Journal, Plan, journal
from growkit.checkpoint.publishing import writing
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.resuming import take_over
from growkit.checkpoint.writing import Shard, parse_bytes, shards_of, write_index, write_shards
from growkit.engine.class_names import class_names
from growkit.errors import InputError
from growkit.families.added import knowing
from growkit.families.family import family_of
from growkit.planner import plan
from growkit.planning.lineage import Lineage
from growkit.ranks import Ranks, Task
from growkit.recipe.places import inputs_of, output_path
from growkit.recipe.recipe import Recipe
from growkit.report.progress import Progress
from growkit.sources.source import find, pair
from growkit.version import __version__


class OutputWeights:
    """The weights of an output, as they are to be written.

    Args:
        recipe: how they are made, with what was found out on the way.
        source: what they are made from.
        lineage: from the source to the output.
    """

    def __init__(self, recipe: Recipe, source: Checkpoint, lineage: Lineage) -> None:
        self._recipe, self._source, self._lineage = recipe, source, lineage
        self.distributed = recipe.format == "dcp"
        tensors, limit = lineage.target.tensors, parse_bytes(recipe.shard_size)
        self.shards: Sequence[Shard] = (
            distributed_shards(tensors, limit) if self.distributed else shards_of(tensors, limit)
        )
        self.names = {shard.name for shard in self.shards}

    @cached_property
    def repeatable(self) -> list[str]:
        """Names of the shards that any process makes with the same bits."""
        same = self._lineage.repeatable
        return [shard.name for shard in self.shards if all(map(same, shard.tensors))]

    def plan(self, read: Mapping[str, str]) -> Plan:
        """Everything on which the bytes of the shards depend.

        Args:
            read: the SHA-256 of every file of the source.
        """
        recipe = self._recipe.by_names().as_dict()
        parts: dict[str, Any] = {
            "the recipe": {key: recipe.get(key) for key in ("steps", "seed", "dtype", "family")},
            "the source": dict(read),
            "the layout of the shards": {each.name: _layout(each) for each in self.shards},
        }
        hashes = {name: _sha256(_as_text(part)) for name, part in parts.items()}
        return {"the version of growkit": __version__, **hashes}

    def task(self, folder: Path, there: Collection[str]) -> Task:
        """What other processes are to write, which plan by themselves.

        Args:
            folder: where.
            there: names of shards that are there.
        """
        made = _sha256(_as_text(self.plan({})))
        shared = [name for name in self.repeatable if name not in there]
        return Task(str(folder), made, _read(self._source), shared)

    def resumed(
        self, output: Path, folder: Path, kept: Journal, progress: Progress
    ) -> dict[str, int]:
        """Take over what a killed run has finished; see ``take_over``."""

        def now() -> Plan:
            return self.plan(kept.hashes())

        return take_over(output, now, self.repeatable, folder, kept, progress)

    def write(
        self,
        folder: Path,
        there: Mapping[str, int],
        kept: Journal,
        ranks: Ranks,
        advance: Callable[[int], None],
    ) -> dict[str, Finished]:
        """Write all shards that are missing, together with others, and the index.

        Args:
            folder: where they belong.
            there: names of shards that are there, and the size of their files.
            kept: the journal of this process.
            ranks: all processes that write.
            advance: called with the number of bytes written, by whichever process.

        Returns:
            The shards that others have written.
        """
        of_class = self._names()  # before anything that takes time
        task = self.task(folder, there)
        own = [name for name in self.names if name not in there and name not in task.shards]
        advance(sum(shard.bytes for shard in self.shards if shard.name in there))
        with ranks.leading(folder.parent, task, advance) as share:

            def counted(count: int) -> None:
                advance(count)
                share.heed()

            names = chain(sorted(own), share.take(task.shards))
            self.write_some(names, folder, kept, counted)
            others = share.gather()
        assert all((folder / name).exists() for name in self.names)
        if self.distributed:
            write_list(self.shards, folder, of_class)
        else:
            write_index(self.shards, folder)
        return others

    def _names(self) -> dict[str, str]:
        """Names of the model's class for the tensors, which files of transformers do not need."""
        if not self.distributed:
            return {}
        target = self._lineage.target
        family = family_of(target.config, self._recipe.output)
        return class_names(target, dict(family.named(target.config)))

    def write_some(
        self,
        names: Iterable[str],
        folder: Path,
        kept: Journal,
        advance: Callable[[int], None],
    ) -> None:
        """Write some shards, and have each in the journal once it is finished."""
        by_name = {shard.name: shard for shard in self.shards}

        def finished(shard: Shard) -> None:
            kept.finish(folder / shard.name)

        shards = (by_name[name] for name in names)
        write_shards(self._lineage.target, folder, shards, advance, finished)


def follow(recipe: Recipe, ranks: Ranks, reads: Sequence[str | Path] = ()) -> None:
    """Write some of the shards of an output, and look at some of its tensors, for another process.

    Args:
        recipe: the same as that of the other.
        ranks: all processes that write.
        reads: files that are read beside those that the recipe names.

    Raises:
        InputError: this or another process cannot go on.
    """
    with knowing(recipe.family), ranks.following() as (task, share):
        if not task.shards and recipe.verify is None:
            share.report({})
            return
        output, found = output_path(recipe), find(recipe.source)
        inputs = inputs_of(replace(recipe, source=str(found.folder)), reads)
        source = found.open()
        if task.read != _read(source):
            raise InputError(
                f"{recipe.source} is another one for rank {ranks.rank}; all ranks must read the "
                "same files"
            )
        prepared = plan(recipe, source)
        recipe = replace(recipe, steps=prepared.steps)
        weights = OutputWeights(recipe, source, prepared.lineage)
        folder = Path(task.folder)
        if weights.task(folder, ()).made != task.made:
            raise InputError(
                f"rank {ranks.rank} has another plan than rank 0; start all ranks with the same "
                "recipe, arguments and version of growkit"
            )
        unchanged = partial(inputs.check_unchanged, [*files_of(source).values()])
        with writing(output), journal(folder.parent, ranks.rank, unchanged) as kept:

            def counted(count: int) -> None:
                share.count(count)
                share.heed()

            weights.write_some(share.take(task.shards), folder, kept, counted)
            share.report(kept.finished())
        names = share.asked()
        if names:
            from growkit.proof.verdict import look_at

            lost = look_at(*pair(found, find(folder)), recipe, names, share.heed)
            share.tell_lost(filter(None, [lost]))


def files_of(source: Checkpoint) -> dict[str, Path]:
    """The files of a source that a model is made from, by their paths in it."""
    files = {file.relative_to(source.folder).as_posix(): file for file in source.files}
    return files | {"config.json": source.folder / "config.json"}


def _read(source: Checkpoint) -> dict[str, list[int]]:
    """Size and time of the last change of each of these."""
    states = {name: file.stat() for name, file in files_of(source).items()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _layout(shard: Shard) -> list[str]:
    """All that stands in a shard beside the tensors."""
    return [f"{offset} {_sha256(text)}" for offset, text in shard.frame.items()]


def _as_text(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
