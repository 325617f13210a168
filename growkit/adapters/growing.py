"""Grow an adapter with its model.

The adapter is read and refused before anything is written, and written after the weights, into a
folder of its own in that of the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from growkit.adapters.folder import AdapterFolder
from growkit.adapters.following import followed
from growkit.adapters.modules import Modules
from growkit.adapters.parts import Parts
from growkit.adapters.targets import retargeted
from growkit.adapters.together import Together
from growkit.base.progress import Progress
from growkit.base.tensors import total_bytes, total_parameters
from growkit.checkpoint.folder import ADAPTER, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from growkit.checkpoint.publishing import MANIFEST, write_json
from growkit.checkpoint.reading import Checkpoint, outlined
from growkit.checkpoint.writing import Hashes, shards_of, write_shards
from growkit.planning.plan import Lineage
from growkit.planning.updates import Law, law_of, summary
from growkit.results.operation import AdapterResult
from growkit.version import __version__


class Adapter:
    """An adapter of a source, and what becomes of it.

    Args:
        path: its folder.
        source: the model that it adapts.
        lineage: from the source to the target.
        output: the name of the target in the new adapter.

    Attributes:
        folder: as it was read.
        of_class: the same with the names of the source's class, where it is of a multimodal one.
        lineage: of its tensors.
        target: the grown tensors.
        config: the contents of the new ``adapter_config.json``.
        bytes: how much will be written.

    Raises:
        InputError: it is damaged, of another model, or nothing follows for a tensor.
    """

    def __init__(self, path: Path, source: Checkpoint, lineage: Lineage, output: str) -> None:
        self.folder, self._base, own = AdapterFolder(path), lineage, Modules(source)
        parts = Parts(self.folder, own)
        same = Together(parts, parts.entries, own, path)
        self.of_class = self.folder.renamed(retargeted(self.folder, same.adapted, own), same)
        self.lineage, entries = followed(parts, lineage)
        with outlined(lineage.target, lineage.target.config) as outline:
            modules = Modules(outline)
        self.target = Together(self.lineage.target, entries, modules, path)
        self.bytes = total_bytes(self.target.tensors)
        config = retargeted(self.folder, self.target.adapted, modules)
        self.config = {**config, "base_model_name_or_path": output, "revision": None}

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        return self.folder.files

    def result(self) -> AdapterResult:
        """What is known of it before and after it is written."""
        return AdapterResult(
            path=str(self.folder.opened.path),
            method=str(self.folder.config["peft_type"]),
            tensors=len(self.target.tensors),
            source_parameters=total_parameters(self.folder.file.tensors),
            parameters=total_parameters(self.target.tensors),
            bytes=self.bytes,
            updates=summary(self._law(), self.target.tensors),
        )

    def write(self, folder: Path, law: Law, progress: Progress, hashes: Hashes) -> AdapterResult:
        """Write the grown adapter into a folder that holds the target already.

        Args:
            folder: of the target.
            law: how the target is to be updated; that of the adapter follows from the same plans.
            progress: where progress is shown.
            hashes: of the files, which are computed while they are written.

        Raises:
            InputError: a tensor of the adapter cannot be read.
        """
        inside = folder / ADAPTER_FOLDER
        inside.mkdir()
        self.folder.opened.carry_over(inside)
        (shard,) = shards_of(self.target.tensors, self.bytes + 1)
        with progress.bytes("adapter", self.bytes) as advance:
            shard = replace(shard, name=ADAPTER_WEIGHTS[0])
            write_shards(self.target, inside, [shard], advance, hashes)
        write_json(inside / ADAPTER, self.config)
        result = self.result()
        write_json(inside / MANIFEST, {"growkit": __version__, "updates": result["updates"]})
        return result

    def _law(self) -> Law:
        """How the adapter is to be updated, by the names of its tensors in the file."""
        own, model = law_of(self.lineage), law_of(self._base)
        updates = {key: own.updates[names[0]] for key, names in self.target.made.items()}
        # Where copies of the model are read in unequal parts, their gradients are unequal as well.
        return Law(updates, tuple(dict.fromkeys((*own.why, *model.why))))
