"""Embeddings and experts that differ in a target of unknown origin, although no prompt shows it.

If most rows are those of the source, bit for bit, the residual stream has the same basis, so that
another row is another function of a token, or of a position. Likewise, another expert, or another
row of its router, is another function of the tokens that are sent to it. Experts may be in another
order together with their rows of the router.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

from torch import Tensor, nn

from growkit.base.tensors import parts, widened
from growkit.engine.class_weights import class_weights
from growkit.model.model import Model
from growkit.proof.check import Check
from growkit.proof.config_comparison import layers_of
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section, counted


def check_unseen_parts(pair: Pair, function: Function) -> Section | None:
    """Compare embeddings row by row, and experts one by one.

    None if all or none of them differ.
    """
    if not pair.lineage.unknown or not function.kept:
        return None
    before, after = class_weights(pair.before), class_weights(pair.after)
    findings = []
    as_deep = layers_of(before.config) == layers_of(after.config)
    for part, names in _parts(function.strict.side.models[1].model):
        if part == "expert" and not as_deep:  # the same name may be that of another layer
            continue
        held = [name for name in names if {name} <= before.tensors.keys() & after.tensors.keys()]
        alike = [n for n in held if before.tensors[n].shape == after.tensors[n].shape]
        compared = [name for name in alike if name not in after.in_blocks]
        differing = {name: _differing_rows(before, after, name) for name in compared}
        wrong = set[int]().union(*differing.values())
        if part == "expert":
            of_source = {_digest(before, compared, row) for row in wrong}
            wrong = {row for row in wrong if _digest(after, compared, row) not in of_source}
        for name, rows in differing.items():
            info = before.tensors[name]
            one_each = info.elements == max(info.shape)  # no basis could explain them
            if wrong & rows and (one_each or 2 * len(rows) <= info.shape[0]):
                findings.append(_finding(part, name, wrong & rows))
    return Section(findings=findings, notes=[]) if findings else None


def _parts(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The parameters of each embedding, and those with an entry for each expert of a layer."""
    experts: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if isinstance(module, nn.Embedding):
                yield "row", [name]
            elif parameter.dim() > 2:
                experts[prefix.rpartition(".")[0]] = len(parameter)
    for block, count in experts.items():
        inside = model.get_submodule(block).named_parameters(block)
        yield (
            "expert",
            [name for name, of in inside if [n for n in of.shape if n > 1][:1] == [count]],
        )


def _finding(part: str, name: str, rows: set[int]) -> Finding:
    which = f"{counted(len(rows), part)} of {name} (first {min(rows)})"
    not_same = f"{'is' if len(rows) == 1 else 'are'} not the source's"
    sentence = f"{which} {not_same}, although no prompt shows it"
    finding = Finding(name="unseen_parts", kept=False, sentence=sentence, place=name)
    finding.advice = (
        "compare the vocabularies; then convert the source's embedding again"
        if part == "row"
        else "convert these experts from the source again"
    )
    return finding


def _digest(model: Model, names: Sequence[str], row: int) -> bytes:
    """The numbers that parameters have in a row, as a digest."""
    digest = sha256()
    for name in names:
        numbers = _read(model, name, slice(row, row + 1)).double()
        digest.update((numbers + 0.0).numpy().tobytes())  # zeros of both signs are the same
    return digest.digest()


def _read(model: Model, name: str, rows: slice) -> Tensor:
    """Rows of a parameter; a first dimension of size 1 does not count."""
    if model.tensors[name].shape[0] == 1:
        return widened(model.read(name))[0, rows]
    return widened(model.read(name, rows))


def _differing_rows(before: Model, after: Model, name: str) -> set[int]:
    rows = set[int]()
    alone = before.tensors[name].shape[0] == 1
    for part in [slice(0, None)] if alone else parts(before, name):
        was, now = (_read(model, name, part) for model in (before, after))
        differ = (was != now).reshape(len(was), -1).any(1)
        rows.update((differ.nonzero()[:, 0] + part.start).tolist())
    return rows


CHECK = Check(check_unseen_parts)
