"""Embeddings and experts that differ in a target of unknown origin, although no prompt shows it.

If most rows are those of the source, bit for bit, the residual stream has the same basis, so that
another row is another function of a token, or of a position. Likewise, another expert among those
of the source is another function of the tokens that the router sends to it.
"""

import torch
from torch import nn

from growkit.base.tensors import parts, widened
from growkit.engine.class_weights import class_weights
from growkit.model.model import Model
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section, counted


def check_unseen_parts(pair: Pair, function: Function) -> Section | None:
    """Compare embeddings row by row, and stacked experts one by one.

    None if all or none of them differ.
    """
    if not pair.origin.unknown or not function.kept:
        return None
    before, after = class_weights(pair.before), class_weights(pair.after)
    names: dict[str, str] = {}
    for prefix, module in function.strict.side.models[1].model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        stacked = any(parameter.dim() > 2 for parameter in own.values())  # with their biases
        if stacked or isinstance(module, nn.Embedding):
            part = "expert" if stacked else "row"
            names |= {name: part for name, parameter in own.items() if parameter.dim() > 1}
    findings = []
    for name, part in names.items():
        was, now = before.tensors.get(name), after.tensors.get(name)
        if was is None or now is None or was.shape != now.shape or name in after.in_blocks:
            continue
        rows = _differing_rows(before, after, name)
        if 0 < 2 * len(rows) <= was.shape[0]:
            which = f"{counted(len(rows), part)} of {name} (first {int(rows[0])})"
            not_same = f"{'is' if len(rows) == 1 else 'are'} not the source's"
            sentence = f"{which} {not_same}, although no prompt shows it"
            finding = Finding(name="unseen_parts", kept=False, sentence=sentence, place=name)
            finding.advice = (
                "compare the vocabularies; then convert the source's embedding again"
                if part == "row"
                else "convert these experts from the source again"
            )
            findings.append(finding)
    return Section(findings=findings, notes=[]) if findings else None


def _differing_rows(before: Model, after: Model, name: str) -> torch.Tensor:
    rows = [
        (widened(before.read(name, part)) != widened(after.read(name, part)))
        .flatten(1)
        .any(1)
        .nonzero()[:, 0]
        + part.start
        for part in parts(before, name)
    ]
    return torch.cat(rows)


CHECK = Check(check_unseen_parts)
