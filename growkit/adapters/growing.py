"""Growth of an adapter with its model.

The adapter is read and checked before anything is written. It is written after the weights, into a
folder inside the model's folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from growkit.adapters.assembly import Assembly
from growkit.adapters.folder import AdapterFolder
from growkit.adapters.lineage import adapter_lineage
from growkit.adapters.modules import Modules, retarget
from growkit.adapters.tensors import AdapterTensors
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
    """An adapter of a source, which grows with it.

    Args:
        path: the adapter's folder.
        source: the model that it adapts.
        lineage: the plans from the source to the target.
        output: name of the target in the grown adapter.

    Attributes:
        folder: the source's adapter.
        files: all files that growkit reads.
        of_class: the same adapter with the names of the source's class; an adapter of a multimodal
            model has other names.
        lineage: the plans of its tensors.
        target: the grown tensors.
        config: the contents of the grown ``adapter_config.json``.
        bytes: size of the grown tensors.

    Raises:
        InputError: the adapter is damaged, belongs to another model, or cannot follow the plans.
    """

    def __init__(self, path: Path, source: Checkpoint, lineage: Lineage, output: str) -> None:
        self.folder, self._base, own = AdapterFolder(path), lineage, Modules(source)
        self.files = self.folder.files
        parts = AdapterTensors(self.folder, own)
        same = Assembly(parts, parts.entries, own, path)
        self.of_class = self.folder.renamed(retarget(self.folder, same.adapted, own), same)
        self.lineage, entries = adapter_lineage(parts, lineage)
        with outlined(lineage.target, lineage.target.config) as outline:
            modules = Modules(outline)
        self.target = Assembly(self.lineage.target, entries, modules, path)
        self.bytes = total_bytes(self.target.tensors)
        config = retarget(self.folder, self.target.adapted, modules)
        self.config = {**config, "base_model_name_or_path": output, "revision": None}

    def result(self) -> AdapterResult:
        """Describe the growth."""
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
        """Write the grown adapter into the folder of the written target.

        Args:
            folder: folder of the target.
            law: not used; the law of the adapter follows from its own plans.
            progress: receives the progress.
            hashes: receives the hashes of the files.

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
        """The law of updates of the adapter, by the names of its tensors in the file."""
        own, model = law_of(self.lineage), law_of(self._base)
        updates = {key: own.updates[names[0]] for key, names in self.target.made.items()}
        # If the model reads copies in unequal parts, their gradients are unequal as well.
        return Law(updates, tuple(dict.fromkeys((*own.why, *model.why))))
