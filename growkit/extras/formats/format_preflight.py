"""Before a model is written in another program's format: does the format hold all of its settings?

The files are outlined without the data of tensors, read again, and compared with the source as the
proof will compare them.
"""

import json
from collections.abc import Mapping

from growkit.base.errors import InputError
from growkit.base.tensors import TensorInfo
from growkit.engine.loader import loading
from growkit.engine.written_config import config_to_write
from growkit.model.checkpoint.format import Format, Output
from growkit.model.checkpoint.publishing import write_json
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import temporary
from growkit.model.checkpoint.writing import write_frame
from growkit.model.families.family_parts import value_at
from growkit.model.model import Model
from growkit.planning.plan import Lineage
from growkit.proof.config_comparison import different_settings, judge
from growkit.proof.weights import as_planned


def check_settings_held(
    files: Output, file_format: Format, source: Model, lineage: Lineage
) -> None:
    """Refuse a model of which another program would read other settings or tensors.

    Args:
        files: the planned files.
        file_format: their format.
        source: the source.
        lineage: the plan that keeps it.

    Raises:
        InputError: a setting or tensor is lost; the message names it.
    """
    assert isinstance(source, Checkpoint)
    with temporary("outline") as folder:
        for shard in files.shards:
            write_frame(shard, folder, whole=True)
        for name, content in files.files.items():
            (folder / name).write_bytes(content)
        if not file_format.self_contained:
            write_json(folder / "config.json", files.config | config_to_write(lineage))
        try:
            written = Checkpoint(folder)
        except InputError as error:
            raise InputError(
                f"the files of {file_format.title} cannot hold {source.where()}, as they would be "
                f"read with other sizes ({error}); convert it to another format"
            ) from None
        lost = _first_lost(lineage.target.tensors, written.tensors)
        lost = lost or _first_other_setting(as_planned(source, lineage), written)
    if lost is not None:
        raise InputError(
            f"the files of {file_format.title} cannot say that {source.where()} has {lost}; "
            "convert it to another format"
        )


def _first_other_setting(source: Checkpoint, written: Checkpoint) -> str | None:
    """The first setting that is read again with another value."""
    was, now = loading(source).config, loading(written).config
    decide, others = different_settings(was, now, judge(written, is_target=True))
    for key in sorted({*decide, *others} - {"dtype"}):
        if written.states(key.partition(".")[0]):
            values = [json.dumps(value_at(config, key)) for config in (was, now)]
            return f"{key} {values[0]} (it would be read as {values[1]})"
    return None


def _first_lost(planned: Mapping[str, TensorInfo], written: Mapping[str, TensorInfo]) -> str | None:
    """The first tensor that is not read again in its shape."""
    for name, info in planned.items():
        if name not in written or written[name].shape != info.shape:
            return f"tensor {name}"
    return None
