"""Conversion to plain DIFF (arXiv 2410.05258), from any variant and from softmax attention.

- Grouped DIFF: every noise head is copied for each signal head of its group.
- Shared DIFF: bases and updates are multiplied out.
- DINT: the integral is dropped; nothing is lost if it has a gate that is still 0.
- Softmax attention: noise heads are copies of signal heads, with λ = ½ from vectors whose two
  exponentials cancel, and ``o_proj`` × 2 compensates. By default there is no head norm, which
  weights cannot undo. With one, heads lose their sizes, which differ from token to token; every
  head gets the typical size of the layer's values instead, the best that one number per layer can
  do. A norm also hides λ while noise equals signal: λ learns as soon as noise heads differ.
"""

from collections.abc import Mapping
from functools import partial

from growkit.algebra.splits import Shares, noise
from growkit.base.lazy import Tensor, np, torch
from growkit.base.options import Option
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.composed_transforms import Computed
from growkit.extras.differential.conversions.diff_v2 import differential, doubled, noise_like_signal
from growkit.extras.differential.conversions.layout_conversions import OnDiffTransformer, refuse
from growkit.extras.differential.conversions.shared_diff import multiplied_out
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.extras.differential.diff_family import LAMBDA
from growkit.extras.differential.growth.group_diff import OPERATION as GROUP_DIFF
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change
from growkit.planning.plan import Plan, Planned
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Transform

LAMBDA_INIT = 0.5
"""λ_init, and λ itself, of every layer; half of each head remains."""


class Diff(OnDiffTransformer):
    """See the module."""

    name = "diff"
    paper = "https://arxiv.org/abs/2410.05258"
    options = (
        Option(
            "head_norm",
            "norm of the heads of a softmax model: none, or one that cannot be undone",
            ("none", "affine", "plain"),
        ),
    )

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = DIFF.complete(source.config)
        if not diff["num_noise_heads"]:
            return _differential(source, diff, options["head_norm"])
        if options["head_norm"] != "none":
            raise refuse(self.name, diff, "head_norm is for softmax models; leave it out")
        plans: list[Plan] = []
        promise, lost, current = "exact", "", source
        if diff["qk_projection"] == "shared":
            full = diff | {"qk_projection": "full"}
            plans.append(multiplied_out(source, full))
            if any(source.tensors[name].dtype != "F64" for name in plans[0].recomputed_sources):
                promise = "bounded"
                lost = "one rounding of each query and key weight; --dtype float64 has none"
            diff, current = full, Planned(source, plans[0])
        if diff["integral"] != "none":
            gates = [name for name in source.tensors if name.endswith("gamma_gate")]
            if diff["gamma"] != "gated" or any(source.read(gate).any() for gate in gates):
                promise, lost = "different", "the integral, which this model has learned to use"
            none = {"integral": "none", "integral_method": "exact", "use_cache": True}
            plans.append(rewrite(current, DIFF, diff | none))
            current = Planned(current, plans[-1])
        ratio = (diff["num_attention_heads"] - diff["num_noise_heads"]) // diff["num_noise_heads"]
        if ratio > 1:
            copies = {"noise_heads": f"x{ratio}", "symmetry": "keep"}
            plans += GROUP_DIFF.plan(current, copies, 0).plans
        if not plans:
            raise refuse(self.name, diff, "it is DIFF already")
        return Change(plans, promise, lost)


def _differential(source: Model, diff: Config, head_norm: str) -> Change:
    """Plan noise heads for a softmax model."""
    switches = {
        "lambda_type": "vectors",
        "lambda_init": [LAMBDA_INIT] * diff["num_hidden_layers"],
        "noise_keys": "own",
        "num_key_value_heads": 2 * diff["num_key_value_heads"],
        "head_norm": head_norm,
    }
    if head_norm == "none":
        return Change([rewrite(source, DIFF, differential(diff, switches), _from_softmax)])
    # The factor 1 - λ_init is ½, too, and o_proj × 2 compensates for it.
    switches["head_output_scale"] = "one_minus_lambda_init"

    def special(member: Member, info: TensorInfo) -> Transform | None:
        names = ("input_layernorm.weight", "self_attn.v_proj.weight", "self_attn.v_proj.bias")
        bias = diff["attention_bias"]
        values = tuple(f"model.layers.{member.layer}.{name}" for name in names[: 3 if bias else 2])
        if member.name.endswith("head_norm.weight"):
            return Computed(
                values,
                "the size of values",
                lambda *read: _size(*read).expand(info.shape).to(info.torch_dtype),
                dtype=info.dtype,
            )
        if head_norm == "plain" and member.name.endswith("o_proj.weight"):
            return Computed(
                (member.name, *values), "× 2 and the size of values", _doubled_and_sized
            )
        return _from_softmax(member, info)

    plan = rewrite(source, DIFF, differential(diff, switches), special)
    return Change([plan], "different", "the sizes of heads: a head norm cannot be undone")


def _from_softmax(member: Member, info: TensorInfo) -> Transform | None:
    last = member.name.rpartition(".")[2]
    if last in LAMBDA:
        # Equal dot products make the exponentials cancel; vectors of zeros could not train.
        return Computed((), "λ = ½", partial(_vector, f"{member.layer}.{last[:-1]}", info))
    if member.name.endswith(("k_proj.weight", "k_proj.bias")):
        return doubled(member.name, info, "noise keys copy signal keys")
    return noise_like_signal(member, info)


def _size(norm: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    """Estimate the root mean square of values for hidden states in random directions.

    Weights alone show no more about normed hidden states, whose mean square is 1. A head that
    attends to one token is as large as the token's value.

    Args:
        norm: weight of the norm before the projection, [hidden].
        weight: weight of the projection, [values, hidden].
        bias: bias of the projection, [values], if there is one.
    """
    squares = (weight.double() * norm.double()).square().sum(1)
    for vector in bias:
        squares += vector.double().square()
    return squares.mean().sqrt()


def _doubled_and_sized(output: Tensor, *values: Tensor) -> Tensor:
    return (2 * _size(*values) * output.double()).to(output.dtype)


def _vector(name: str, info: TensorInfo) -> Tensor:
    (length,) = info.shape
    numbers = noise(Shares(None).key(name, 1, 0), np.zeros(1, np.int64), length)
    return (torch.from_numpy(numbers[0]).double() * (0.2 / 2**15)).to(info.torch_dtype)


OPERATION = Diff()
