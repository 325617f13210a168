"""The public names, each imported on first use."""

from growkit import distributed, results, training
from growkit.base import __version__
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

__all__ = [
    "Bars",
    "CheckResult",
    "ConvertStep",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "EngineResult",
    "GrowResult",
    "GrowStep",
    "Inference",
    "InputError",
    "Inspection",
    "ProbeResult",
    "ProbeSettings",
    "Progress",
    "Recipe",
    "Settings",
    "ShrinkStep",
    "VerifyResult",
    "__version__",
    "check",
    "convert",
    "distributed",
    "grow",
    "infer",
    "inspect",
    "load",
    "load_recipe",
    "plan",
    "probe",
    "register_own_classes",
    "results",
    "run",
    "save_report",
    "show",
    "shrink",
    "training",
    "verify",
    "verify_logits",
]
