"""Whether the tokens that are left compute what they did under their old ids, among all others.

The rest of the proof renumbers the tokens of the source, as the operation does. A model that reads
more of an id than rows of its tables, such as a hash of it, would be changed alike on both sides.
"""

from bisect import bisect_left

import torch

from growkit.base.limits import within
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise, last_state
from growkit.engine.metrics import TOKENS_FIRST, error_of, finite
from growkit.engine.strict import strict_float64
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.proof.weights import as_planned
from growkit.results.proof_result import Finding, Section


def compare_tokens_left(pair: Pair, function: Function) -> Section | None:
    """Compare the source with what is left of it, on the first tokens of the first prompt."""
    if (kept := pair.lineage.tokens) is None:
        return None
    ids, place = pair.prompts.windows[0][:TOKENS_FIRST], function.strict.side.place
    with strict_float64():
        source = Layerwise(as_planned(pair.stored, pair.lineage), torch.float64, place)
        state = last_state(source.stages([Call(torch.tensor(kept)[ids])]))
        with source.head() as head:
            logits = head(state)
        columns = kept[: bisect_left(kept, logits.shape[1])]  # others have no logits
        share = 1 - float(logits.softmax(-1)[:, columns].sum(-1).mean())
        left = Layerwise(pair.before, torch.float64, place).logits(Call(ids))
        error = error_of(left, logits[:, columns])
    limit = function.strict.limit.largest
    of = f"{len(kept)} tokens were compared; the others of the source's {logits.shape[1]} take"
    sentence, advice = f"the logits of {of} {share:.2g} of its softmax", None
    if not within(error, limit):
        sentence = (
            f"the source computes other logits for the {len(kept)} tokens under their old ids, by "
            f"{error:.1e} of their scale: it reads more of an id than a row of a table"
        )
        advice = "keep all tokens of such a model"
    finding = Finding(
        name="tokens_left",
        kept=within(error, limit),
        sentence=sentence,
        measured=finite(error),
        limit=limit,
        advice=advice,
        in_reason=True,
    )
    return Section(findings=[finding], notes=[])


CHECK = Check(compare_tokens_left)
