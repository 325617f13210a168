"""Public layouts of differential attention: one model, stored in different ways.

Every layout is converted to and from that of the DIFF Transformer, by the ``DiffForm`` of its
family. Most layouts differ only in the order of rows. Otherwise two things are computed:

- λ_init belongs to the layer. For a family that computes it from the layer's index, the λ vectors
  are changed so that λ stays the same number.
- The weight of the head norm and the factor 1 - λ_init both scale the columns that ``o_proj``
  reads. If a family lacks one of them, it is multiplied into the other, or into ``o_proj``. No
  number is ever rounded: if the storage dtype cannot hold it, head norms are stored in float64, and
  for ``o_proj`` the conversion is refused.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from growkit.base.axes import Pattern
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.limits import within
from growkit.base.tensors import Config, main_dtype
from growkit.extras.composed_transforms import Computed
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.extras.differential.diff_family import LAMBDA, OPTIONAL_KEYS
from growkit.model.families.family import Family, families, family_of
from growkit.model.families.family_parts import DiffForm, Member
from growkit.model.model import Model
from growkit.planning.plan import Plan
from growkit.planning.transforms import Constant, Kept, Mapped, Transform, row_maps

FOLDER_KEYS = ("architectures", "auto_map", "model_type", "transformers_version")
HEAD_NORM = "head_norm.weight"
OUTPUT = "o_proj.weight"
COMPUTED = ("lambda_init", "head_norm", "head_output_scale")
"""Keys in which layouts may differ, since weights can make up for the difference."""

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Keys of windows, which DIFF Transformers do not have."""

NEUTRAL_KEYS = frozenset(
    (
        *("dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp"),
        *("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling"),
        *("attention_dropout", "hidden_dropout", "lambda_std_dev", "lambda_init"),
        *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "return_dict"),
        *("is_decoder", "is_encoder_decoder", "tokenizer_class", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "pruned_heads", "loss_type"),
        *("rope_interleaved", "unsloth_version", "unsloth_fixed", "transformers.js_config"),
    )
)
"""Keys that every form understands: on training, positions, tokens and tools."""

ENOUGH = 2.0**-52
"""Relative error up to which a dot product is exact."""

MAX_EXPONENT = 700
"""Limit for the exponents in λ, so that float64 can hold the exponentials."""

LAMBDA_TOLERANCE = 1e-13
"""Tolerance for λ, relative to its exponentials, or absolute if these are small."""


def layout_names() -> dict[str, Family]:
    """The families that are DIFF Transformers, by name on the command line."""
    layouts = {name: of for name, of in families("form").items() if of.form or of is DIFF}
    return {name.replace("_", "-"): family for name, family in layouts.items()}


def is_differential(family: Family, config: Config) -> bool:
    """Whether a model has noise heads."""
    return bool(family.form and family.sizes(config).get("noise_heads"))


def as_diff_transformer(config: Config, where: str) -> Config:
    """Convert the config of any layout to that of a DIFF Transformer.

    Raises:
        InputError: the family is not a layout, or a DIFF Transformer cannot express the model.
    """
    family = family_of(config, where)
    if family is DIFF:
        return config
    form = _form(family, where)
    for key, values in form.harmless.items():
        value = config.get(key, form.assumed.get(key, values[0]))
        if value not in values:
            raise InputError(
                f"config.json in {where}, or its class, has {key} {value!r}; only "
                f"{' or '.join(map(repr, values))} can become a DIFF Transformer"
            )
    _check_known(family, form, config, where)
    complete = family.complete(config)
    types = complete.get("layer_types")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise InputError(
            f"config.json in {where} has layer_types {types}, but all layers of a DIFF Transformer "
            "attend to the whole text; 'full_attention' was expected for each"
        )
    sizes = {"noise_heads": 0} | family.sizes(config)
    sizes.setdefault("signal_heads", sizes.get("heads", 0))  # softmax families have only heads
    sizes["value_head_dim"] = _value_head_dim(family, config)
    own = {*FOLDER_KEYS, *WINDOW_KEYS, *form.harmless, *form.keys.values(), *family.axes}
    own.update(_without(family))
    plain = {key: value for key, value in complete.items() if key not in own}
    renamed = {key: complete[name] for key, name in form.keys.items()}
    kept = {name: complete[name] for name in form.keys.values() if name in DIFF.defaults}
    diff = plain | kept | renamed | dict(form.switches)
    diff["model_type"] = DIFF.model_types[0]
    diff = _with_numbers(diff, DIFF, sizes)
    if form.lambda_init:
        diff["lambda_init"] = [form.lambda_init(layer) for layer in range(sizes["layers"])]
    own_names = {tensor.canonical or tensor.name for tensor in family.tensors}
    for member in DIFF.members(diff):
        if member.tensor.name not in own_names:
            raise InputError(
                f"with hidden_act {diff.get('hidden_act')!r}, as in config.json of {where}, a "
                f"model has tensor {member.name}, but no {family.name} model has; correct "
                "config.json"
            )
    return diff


def _check_known(family: Family, form: DiffForm, config: Config, where: str) -> None:
    """Refuse unknown keys, which may change the model's function, unless their value is off.

    Raises:
        InputError: there is such a key; the message names it.
    """
    known = NEUTRAL_KEYS.union(
        FOLDER_KEYS, WINDOW_KEYS, form.harmless, form.keys.values(), DIFF.defaults, DIFF.size_keys
    ).union(family.size_keys, family.defaults)
    known -= {*_without(family)}
    for key, value in config.items():
        if not form.strict and key not in OPTIONAL_KEYS:
            continue
        plain = key in known or key.startswith("_") or key.endswith("_token_id")
        if not plain and value is not None and value is not False:
            raise InputError(
                f"config.json in {where} has {key} {value!r}, which growkit does not know in a "
                f"{family.name} model; remove it, if it does not change the model's function"
            )


def _without(family: Family) -> list[str]:
    """The keys of ``OPTIONAL_KEYS`` that models of a family do not have."""
    return [key for key in OPTIONAL_KEYS if key not in family.defaults]


def read_layout(source: Model) -> Plan:
    """Read any layout into the DIFF Transformer's.

    Raises:
        InputError: see ``as_diff_transformer``; or the tensors do not fit the config.
    """
    _ = source.unused  # refuses tensors that do not fit the config
    family = source.family
    config = as_diff_transformer(source.config, source.where())
    stored = {member.canonical: member for member in family.members(source.config)}
    sizes = source.sizes
    transforms = {}
    for target in DIFF.patterns(config):
        name, tensor, *_ = stored[target]
        order = tensor.order(sizes) if tensor.order else ()
        inverse = sorted(range(len(order)), key=order.__getitem__)
        transforms[target] = _reordered(name, source.tensors[name].shape, inverse)
    return Plan.checked(source, config, transforms, DIFF)


def write_layout(source: Model, family: Family) -> Plan:
    """Write a DIFF Transformer in another layout.

    Raises:
        InputError: the layout cannot express the model; the message has the reason.
    """
    form = _form(family, family.name)
    diff = DIFF.complete(source.config)
    config = _written_config(diff, family, form)
    members = family.members(config)
    places = {member.canonical for member in members}
    for name in DIFF.patterns(diff):
        if name not in places and not name.endswith(HEAD_NORM):
            raise InputError(
                f"{family.name} has no place for {name} of {source.where()}; choose another layout"
            )
    sizes = family.sizes(config)
    transforms = {member.name: _written(source, diff, form, sizes, member) for member in members}
    return Plan.checked(source, config, transforms, family)


def _written(
    source: Model, diff: Config, form: DiffForm, sizes: Mapping[str, int], member: Member
) -> Transform:
    """The transform that makes one tensor of another layout.

    Args:
        source: the DIFF Transformer.
        diff: its completed config.
        form: form of the other layout.
        sizes: sizes of the other layout's axes.
        member: the tensor.
    """
    of, layer = member.canonical, member.layer
    if layer is not None:
        weighted = diff["head_norm"] == "affine"
        was = diff["lambda_init"][layer] if diff.get("lambda_init") else 0.0
        will_be = form.lambda_init(layer) if form.lambda_init else was
        # The factor of normed heads, apart from the factor that the layout itself has.
        has = 1 - was if diff["head_output_scale"] != "none" else 1.0
        factor = has / (1 - will_be if form.switches["head_output_scale"] != "none" else 1.0)
        if of.endswith(LAMBDA) and was != will_be:
            prefix, _, vector = of.rpartition(".")
            which = LAMBDA.index(vector)
            return Computed(
                tuple(f"{prefix}.{name}" for name in LAMBDA),
                f"λ solved again for λ_init {will_be:.4f} instead of {was:.4f}",
                partial(_solved, which, was, will_be, f"{prefix} in {source.where(of)}"),
            )
        if of.endswith(HEAD_NORM) and not (weighted and factor == 1):
            dtype = main_dtype(source.tensors) if factor == 1 else "F64"
            if not weighted:
                return Constant(dtype, factor, f"the number {factor:.6g}")
            why = f"scaled by {factor:.6g}"
            return Computed((of,), why, lambda weight: weight.double() * factor, dtype=dtype)
        in_norm = form.switches["head_norm"] == "affine"
        if of.endswith(OUTPUT) and not in_norm and (weighted or factor != 1):
            return Computed(
                (of, of.replace(OUTPUT, HEAD_NORM)) if weighted else (of,),
                "the head norm's weight and factor go into the columns",
                partial(_folded, factor, source.where(of), member.name),
            )
    order = member.tensor.order(sizes) if member.tensor.order else ()
    return _reordered(of, member.pattern.shape(sizes), order)


def _written_config(diff: Config, family: Family, form: DiffForm) -> Config:
    """Convert the config of a DIFF Transformer to the keys of a family."""
    assumed = DIFF.complete({key: value for key, value in diff.items() if key not in OPTIONAL_KEYS})
    fixed = dict(form.switches) | {
        key: assumed[key] for key in _without(family) if key not in form.switches
    }
    problems = [
        f"{key} {diff.get(key)!r} (it has {value!r})"
        for key, value in fixed.items()
        if key not in COMPUTED and diff.get(key) != value
    ]
    if not diff["num_noise_heads"] and "num_noise_heads" not in form.switches:
        problems.append("num_noise_heads 0 (--to diff and diff-v2 add some)")
    unnormed = diff["head_norm"] == "none"
    if unnormed != (form.switches["head_norm"] == "none"):
        problems.append("heads without a norm" if unnormed else "a head norm")
    if problems:
        raise InputError(
            f"{family.one} cannot express {', '.join(problems)}; choose another layout, "
            "or convert it --to diff first"
        )
    # A class knows no key of a switch that it cannot turn, although its description may assume one.
    known = family.defaults.keys() - form.switches.keys()
    known |= {"lambda_std_dev"} if diff["num_noise_heads"] else set()
    only = {*DIFF.defaults, *DIFF.axes, *FOLDER_KEYS} - known
    config = {key: value for key, value in diff.items() if key not in only}
    for key, name in form.keys.items():
        sharing = {k: diff[k] for k in DIFF.defaults if form.keys.get(k, k) == name}
        if any(value != diff[key] for value in sharing.values()):
            listed = " and ".join(f"{k} {value}" for k, value in sharing.items())
            raise InputError(f"{family.one} has one {name} for {listed}; choose another layout")
        config[name] = diff[key]
    config["model_type"] = family.model_types[0]
    config |= {key: form.harmless[key][0] for key in form.assumed}
    sizes = DIFF.sizes(diff)
    sizes["heads"] = sizes["signal_heads"]
    config = _with_numbers(config, family, sizes)
    own_sizes = family.sizes(config)
    own_sizes["value_head_dim"] = _value_head_dim(family, config)
    for axis, size in sizes.items():
        if axis in own_sizes and own_sizes[axis] != size:
            raise InputError(
                f"{family.one} cannot express {axis} {size} with signal_heads "
                f"{sizes['signal_heads']}; choose another layout, such as diff-transformer"
            )
    return config


def _with_numbers(config: Config, family: Family, sizes: dict[str, int]) -> Config:
    """Set every config key that is a sum of sizes."""
    config = dict(config)
    for key, entry in family.axes.items():  # some depend on earlier keys
        axes = entry(config) if callable(entry) else entry
        if axes:
            config[key] = sum(sizes[axis] for axis in axes)
    return config


def _value_head_dim(family: Family, config: Config) -> int:
    sizes = family.sizes(config)
    rows = next(t for t in family.tensors if t.name.endswith("v_proj.weight"))
    return Pattern.parse(rows.pattern).shape(sizes)[0] // sizes["kv_heads"]


def _form(family: Family, where: str) -> DiffForm:
    if family.form is None:
        raise InputError(
            f"{where} is {family.one}, whose attention no DIFF Transformer has; "
            f"layouts are {', '.join(sorted(layout_names()))}"
        )
    return family.form


def _reordered(of: str, shape: tuple[int, ...], order: Sequence[int]) -> Transform:
    """Reorder rows; ``order`` has the source index of every row, and is empty for no change."""
    if list(order) == list(range(len(order))):
        return Kept(of)
    return Mapped(of, partial(row_maps, shape, tuple(order)), "rows in another order")


def _solved(which: int, was: float, will_be: float, where: str, *vectors: Tensor) -> Tensor:
    value = lambda_value(vectors, was, where)
    solved = solve_lambda(vectors, was, will_be)
    error = abs(lambda_value(solved, will_be, where) - value)
    terms = abs(value) + 2 * math.exp(float(vectors[2].double() @ vectors[3].double()))
    if not within(error, LAMBDA_TOLERANCE * max(1.0, terms)):
        raise InputError(
            f"λ of {where} cannot be kept in {vectors[0].dtype} with {len(vectors[0])} "
            f"numbers per vector (it would be {error:.1e} off); pass a wider --dtype"
        )
    return solved[which]


def _folded(factor: float, where: str, name: str, matrix: Tensor, *norm: Tensor) -> Tensor:
    columns = matrix.shape[1]
    weight = torch.full((columns,), factor, dtype=torch.float64)
    if norm:
        weight *= norm[0].double().repeat(columns // len(norm[0]))
    exact = matrix.double() * weight
    folded = exact.to(matrix.dtype)
    if bool(((folded.double() - exact).abs() > 2.0**-50 * exact.abs()).any()):
        raise InputError(
            f"the head norm would be multiplied into {name}, from {where}, which rounds in "
            f"{matrix.dtype}; pass a wider --dtype, or choose a layout with a head norm weight"
        )
    return folded


def lambda_value(vectors: Sequence[Tensor], lambda_init: float, where: str) -> float:
    """λ = exp(λq1·λk1) - exp(λq2·λk2) + λ_init (arXiv 2410.05258, eq. 2), in float64.

    Args:
        vectors: λq1, λk1, λq2 and λk2, each [head_dim].
        lambda_init: λ_init of the layer.
        where: the name of the layer's attention in messages.

    Raises:
        InputError: float64 cannot hold the exponentials.
    """
    q1, k1, q2, k2 = (vector.double() for vector in vectors)
    first, second = float(q1 @ k1), float(q2 @ k2)
    if not (first < MAX_EXPONENT and second < MAX_EXPONENT):
        raise InputError(
            f"λ of {where} has the exponents {first:.4g} (lambda_q1 · lambda_k1) and "
            f"{second:.4g} (lambda_q2 · lambda_k2); numbers below {MAX_EXPONENT} were expected, "
            "correct these tensors, or use an earlier checkpoint"
        )
    return math.exp(first) - math.exp(second) + lambda_init


def solve_lambda(
    vectors: Sequence[Tensor], lambda_init: float, new_lambda_init: float
) -> list[Tensor]:
    """Find vectors that give the same λ with another λ_init.

    The exponential that must grow gets the difference, so that its logarithm exists. Its query
    vector is changed along its key vector, which is the smallest possible change.

    Args:
        vectors: λq1, λk1, λq2 and λk2, each [head_dim].
        lambda_init: λ_init of these vectors.
        new_lambda_init: λ_init of the new vectors.

    Returns:
        The four vectors in their dtype. Their dot products in float64 are exact up to float64's
        rounding, as far as the dtype and head_dim allow.
    """
    difference = lambda_init - new_lambda_init
    solved, first = list(vectors), 0 if difference > 0 else 2
    if difference:
        query, key = vectors[first : first + 2]
        dot = math.log(math.exp(float(query.double() @ key.double())) + abs(difference))
        solved[first : first + 2] = _with_dot(query, key, dot)
    return solved


def _with_dot(query: Tensor, key: Tensor, dot: float) -> tuple[Tensor, Tensor]:
    """Find nearby vectors of the same dtype with a given dot product.

    Rounding the query leaves an error. To correct it, some coordinates are set one after the other:
    each takes the missing amount divided by its key, and leaves an error that is smaller by the
    precision of the dtype.
    """

    def error(query: Tensor) -> float:
        return abs(float(query.double() @ key) - dot)

    dtype = query.dtype
    key = key.double()
    if not bool(key.square().sum()):
        key = torch.full_like(key, math.sqrt(max(abs(dot), 1e-3) / len(key))).to(dtype).double()
    missing = (dot - float(query.double() @ key)) / float(key.square().sum())
    exact = query.double() + key * missing
    # The least important coordinates are used first; a coordinate with a zero key is useless.
    usable = [i for i in (exact * key).abs().argsort().tolist() if bool(key[i])]
    best = exact.to(dtype)
    for count in range(len(usable)):
        spare = usable[:count]
        rest = exact.clone()
        rest[spare] = 0
        if float(rest @ key):
            rest *= dot / float(rest @ key)
        rounded = rest.to(dtype).double()
        for index in reversed(spare):
            rounded[index] = ((dot - float(rounded @ key)) / key[index]).to(dtype).double()
        if error(rounded) < error(best):
            best = rounded.to(dtype)
        if within(error(best), ENOUGH * max(abs(dot), 1e-3)):
            break
    return best, key.to(dtype)
