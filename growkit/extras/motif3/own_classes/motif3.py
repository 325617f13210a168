"""Motif-3, as growkit runs it.

Motif's own class needs flash attention, which has neither float64 nor the CPU.
"""

from growkit.base.tensors import Config
from growkit.extras.inspection.results.inspection_result import Attention
from growkit.model.families.family import Family, shipped_family
from growkit.model.model import Model
from growkit.planning.own_class import OwnClass
from growkit.planning.plan import Plan
from growkit.planning.transforms import Kept

MODEL_TYPE = "motif3"
FAMILY = shipped_family(MODEL_TYPE)


def _runs(family: Family) -> bool:
    return family.name == FAMILY.name


def _config(config: Config, where: str) -> Config:
    """The config in transformers' terms: a list of windows, which count the token itself.

    Raises:
        InputError: the config is not complete.
    """
    complete = dict(FAMILY.complete(config))
    scaling, theta = complete.pop("rope_scaling") or {}, complete.pop("rope_theta")
    window, of_windows = complete["sliding_window"], complete.pop("swa_rope_theta")
    original = scaling.get("original_max_position_embeddings", complete["original_seq_len"])
    yarn = scaling.get("rope_type", scaling.get("type")) == "yarn"
    theta = scaling.get("rope_theta", theta) if yarn else theta
    full = {"rope_type": "default", "rope_theta": theta}
    if yarn and complete["max_position_embeddings"] > original:
        full |= {
            "rope_type": "yarn",
            "factor": scaling.get("factor", complete["rope_factor"]),
            "original_max_position_embeddings": original,
            "beta_fast": scaling.get("beta_fast", 32),
            "beta_slow": scaling.get("beta_slow", 1),
            "attention_factor": 1.0,
        }
    windowed = full if of_windows is None else {"rope_type": "default", "rope_theta": of_windows}
    return complete | {
        "model_type": MODEL_TYPE,
        "sliding_window": window if window is None else window + 1,
        "rope_parameters": {"full_attention": full, "sliding_attention": windowed},
    }


def _plan(source: Model) -> Plan:
    """Keep every tensor.

    Raises:
        InputError: its tensors do not fit its config.
    """
    _ = source.unused  # refuses tensors that do not fit the config
    config = _config(source.config, source.where())
    return Plan.checked(
        source, config, {name: Kept(name) for name in FAMILY.patterns(config)}, FAMILY
    )


def _attention(model: Model) -> Attention | None:
    if not _runs(model.family):
        return None
    sizes = model.sizes
    return Attention(
        variant="grouped latent DIFF V2",
        signal_heads=sizes["signal_heads"],
        noise_heads=sizes["noise_heads"],
        kv_heads=sizes["kv_heads"],
        ratio=sizes["signal_heads"] // sizes["noise_heads"],
        lambda_init=None,
        lambda_value=None,
    )


OWN_CLASS = OwnClass(
    family=FAMILY,
    runs=_runs,
    config=_config,
    plan=_plan,
    attention=_attention,
)
