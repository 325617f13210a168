"""Grow trained language-model checkpoints, and prove that nothing they learned was lost."""

import sys

# ``python -m growkit`` puts the current folder first in the search path, so that a typing.py in an
# untrusted folder would run. Nothing else may be imported before this line; growkit's own files are
# found without that entry.
if getattr(sys, "argv", [""])[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    del sys.path[:1]

from importlib import import_module

from growkit.base import __version__

TYPE_CHECKING = False  # few imports, so that Ctrl-C works early
if TYPE_CHECKING:
    from typing import Any

    from growkit import distributed, results, training
    from growkit.base.errors import InputError
    from growkit.base.progress import Progress
    from growkit.base.settings import Settings
    from growkit.distributed import load
    from growkit.extras.checksums.file_hashes import check
    from growkit.extras.checksums.results.check_result import CheckResult
    from growkit.extras.differential.modeling.configuration_diff_transformer import (
        DiffTransformerConfig,
    )
    from growkit.extras.differential.modeling.modeling_diff_transformer import (
        DiffTransformerForCausalLM,
    )
    from growkit.extras.family_inference.inferring import infer
    from growkit.extras.family_inference.results.inference_result import Inference
    from growkit.extras.inspection.inspecting import inspect
    from growkit.extras.inspection.large_plan import plan
    from growkit.extras.inspection.results.inspection_result import Inspection
    from growkit.extras.probing.probe import probe
    from growkit.extras.probing.probe_settings import ProbeSettings
    from growkit.extras.probing.results.probe_result import ProbeResult
    from growkit.extras.program_logits.logits_alone import verify_logits
    from growkit.extras.program_logits.results.engine_result import EngineResult
    from growkit.pipeline.running import convert, grow, run, shrink
    from growkit.pipeline.verifying import verify
    from growkit.planning.own_class import register_own_classes
    from growkit.planning.recipe import ConvertStep, GrowStep, Recipe, ShrinkStep, load_recipe
    from growkit.report.saving import save_report
    from growkit.report.terminal import Bars, show
    from growkit.results.growth_result import GrowResult
    from growkit.results.proof_result import VerifyResult

_HOMES = {
    "base.errors": "InputError",
    "base.progress": "Progress",
    "base.settings": "Settings",
    "distributed": "load",
    "extras.checksums.file_hashes": "check",
    "extras.checksums.results.check_result": "CheckResult",
    "extras.differential.modeling.configuration_diff_transformer": "DiffTransformerConfig",
    "extras.differential.modeling.modeling_diff_transformer": "DiffTransformerForCausalLM",
    "extras.program_logits.logits_alone": "verify_logits",
    "extras.family_inference.inferring": "infer",
    "extras.family_inference.results.inference_result": "Inference",
    "extras.inspection.inspecting": "inspect",
    "extras.inspection.large_plan": "plan",
    "extras.inspection.results.inspection_result": "Inspection",
    "extras.probing.probe": "probe",
    "extras.probing.probe_settings": "ProbeSettings",
    "extras.probing.results.probe_result": "ProbeResult",
    "pipeline.running": "convert grow run shrink",
    "pipeline.verifying": "verify",
    "planning.own_class": "register_own_classes",
    "planning.recipe": "ConvertStep GrowStep Recipe ShrinkStep load_recipe",
    "report.saving": "save_report",
    "report.terminal": "Bars show",
    "extras.program_logits.results.engine_result": "EngineResult",
    "results.growth_result": "GrowResult",
    "results.proof_result": "VerifyResult",
}
"""Public names by module."""

__all__ = ["InputError", "Progress", "__version__", "distributed", "results", "training"]
__all__ += ["Bars", "CheckResult", "ConvertStep", "DiffTransformerConfig", "GrowResult", "GrowStep"]
__all__ += ["DiffTransformerForCausalLM", "Inference", "Inspection", "ProbeResult", "Recipe"]
__all__ += ["ProbeSettings", "Settings", "VerifyResult", "check", "convert", "grow", "infer"]
__all__ += ["inspect", "load", "load_recipe", "plan", "probe", "register_own_classes", "run"]
__all__ += ["EngineResult", "ShrinkStep", "save_report", "show", "shrink", "verify"]
__all__ += ["verify_logits"]


def __getattr__(name: str) -> "Any":
    # Imported on first use: ``growkit --help`` must not wait for torch.
    if name in ("distributed", "results", "training"):
        return import_module(f"growkit.{name}")
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"growkit.{home}"), name)
    raise AttributeError(f"module 'growkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
