"""Rows of embeddings that differ in a target of unknown origin, although no prompt shows it.

If most rows are those of the source, bit for bit, the residual stream has the same basis, so that
another row is another function of a token, or of a position.
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


def check_embeddings(pair: Pair, function: Function) -> Section | None:
    """Compare embeddings row by row; None if all or none of their rows differ."""
    if not pair.origin.unknown or not function.kept:
        return None
    before, after = class_weights(pair.before), class_weights(pair.after)
    modules = function.strict.side.models[1].model.named_modules()
    names = [f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)]
    findings = []
    for name in names:
        was, now = before.tensors.get(name), after.tensors.get(name)
        if was is None or now is None or was.shape != now.shape or after.rounded_in_blocks(name):
            continue
        rows = _differing_rows(before, after, name)
        if 0 < 2 * len(rows) <= was.shape[0]:
            which = f"{counted(len(rows), 'row')} of {name} (first {int(rows[0])})"
            not_same = f"{'is' if len(rows) == 1 else 'are'} not the source's"
            sentence = f"{which} {not_same}, although no prompt shows it"
            finding = Finding(name="embeddings", kept=False, sentence=sentence, place=name)
            finding.advice = "compare the vocabularies; then convert the source's embedding again"
            findings.append(finding)
    return Section(findings=findings, notes=[]) if findings else None


def _differing_rows(before: Model, after: Model, name: str) -> torch.Tensor:
    rows = [
        (widened(before.read(name, part)) != widened(after.read(name, part))).any(1).nonzero()[:, 0]
        + part.start
        for part in parts(before, name)
    ]
    return torch.cat(rows)


CHECK = Check(check_embeddings)
