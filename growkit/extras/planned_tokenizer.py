"""The tokenizer of a model that steps of a recipe plan, of which some may leave out tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from growkit.base.tensors import Weights
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.scratch import temporary
from growkit.model.model import Model
from growkit.planning.plan import Planned


@contextmanager
def with_tokenizer(source: Model) -> Iterator[Folder]:
    """Open the folder of a model, or a temporary one if an earlier step renumbers its tokens."""
    folder, writing, stage = Folder(source.where()), [], cast("Weights", source)
    while isinstance(stage, Planned):
        writing += [stage.plan.tokens.write] if stage.plan.tokens else []
        stage = stage.source
    if not any(writing):
        yield folder
        return
    with temporary("tokenizer") as place:
        folder.carry_over(place)
        folder.copy("config.json", place)  # the class of the tokenizer depends on its type
        for write in filter(None, reversed(writing)):
            write(Folder(place))
        yield Folder(place)
