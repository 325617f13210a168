"""Tokens that no prompt has, and whose embeddings differ in a target of unknown origin.

If the embeddings of all tokens in the prompts are those of the source, bit for bit, the residual
stream has the same basis, so that another embedding of another token is another function.
"""

import torch

from growkit.base.tensors import parts, widened
from growkit.engine.class_weights import class_weights
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section, counted


def check_tokens(pair: Pair, function: Function) -> Section | None:
    """Compare the embeddings of tokens that no prompt has; None if none of them differs."""
    if not pair.origin.unknown or not function.kept:
        return None
    names = [f"{model.embedding[0]}.weight" for model in function.strict.side.models]
    weights = [class_weights(model) for model in (pair.before, pair.after)]
    read = [of.tensors.get(name) for of, name in zip(weights, names, strict=True)]
    if None in read or len({info.shape for info in read if info}) > 1:
        return None
    if weights[1].rounded_in_blocks(names[1]):
        return None
    differing = [torch.empty(0, dtype=torch.int64)]
    for rows in parts(weights[0], names[0]):
        was, now = (widened(of.read(n, rows)) for of, n in zip(weights, names, strict=True))
        differing.append((was != now).any(1).nonzero()[:, 0] + rows.start)
    tokens = torch.cat(differing)
    if not len(tokens) or torch.isin(tokens, torch.cat(pair.prompts.windows).cpu()).any():
        return None
    which = f"{counted(len(tokens), 'token')} that no prompt has (first {int(tokens[0])})"
    finding = Finding(
        name="unseen_tokens",
        kept=False,
        sentence=f"the embeddings of {which} are not the source's",
        place=names[1],
    )
    finding.advice = "compare the vocabularies; then convert the source's embedding again"
    return Section(findings=[finding], notes=[])


CHECK = Check(check_tokens)
