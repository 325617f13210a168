"""Grow trained language-model checkpoints, and prove that nothing they learned was lost."""

import sys

# ``python -m growkit`` puts the current folder first, so that a folder with, say, a typing.py would
# be run by looking at it. Nothing else may be imported before this; growkit's own files are found
# without it.
if getattr(sys, "argv", [""])[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    del sys.path[:1]

from importlib import import_module

from growkit.version import __version__

TYPE_CHECKING = False  # few imports, so that Ctrl-C works early
if TYPE_CHECKING:
    from typing import Any

    from growkit import distributed as distributed
    from growkit import results as results
    from growkit import training as training
    from growkit.base.errors import InputError as InputError
    from growkit.base.progress import Progress as Progress
    from growkit.base.settings import Settings as Settings
    from growkit.distributed.loading import load as load
    from growkit.inference.inferring import Inference as Inference
    from growkit.inference.inferring import infer as infer
    from growkit.modeling.configuration_diff_transformer import (
        DiffTransformerConfig as DiffTransformerConfig,
    )
    from growkit.modeling.modeling_diff_transformer import (
        DiffTransformerForCausalLM as DiffTransformerForCausalLM,
    )
    from growkit.pipeline.ahead import plan as plan
    from growkit.pipeline.checking import check as check
    from growkit.pipeline.inspection import Inspection as Inspection
    from growkit.pipeline.inspection import inspect as inspect
    from growkit.pipeline.one_step import convert as convert
    from growkit.pipeline.one_step import grow as grow
    from growkit.pipeline.surgery import run as run
    from growkit.probing.probe import probe as probe
    from growkit.probing.settings import ProbeSettings as ProbeSettings
    from growkit.proof.verdict import verify as verify
    from growkit.recipe.files import load_recipe as load_recipe
    from growkit.recipe.recipe import ConvertStep as ConvertStep
    from growkit.recipe.recipe import GrowStep as GrowStep
    from growkit.recipe.recipe import Recipe as Recipe
    from growkit.report.terminal import Bars as Bars
    from growkit.results.check import CheckResult as CheckResult
    from growkit.results.operation import GrowResult as GrowResult
    from growkit.results.probe import ProbeResult as ProbeResult
    from growkit.results.proof import VerifyResult as VerifyResult

_HOMES = {
    "Bars": "growkit.report.terminal",
    "CheckResult": "growkit.results.check",
    "ConvertStep": "growkit.recipe.recipe",
    "DiffTransformerConfig": "growkit.modeling.configuration_diff_transformer",
    "DiffTransformerForCausalLM": "growkit.modeling.modeling_diff_transformer",
    "GrowResult": "growkit.results.operation",
    "GrowStep": "growkit.recipe.recipe",
    "Inference": "growkit.inference.inferring",
    "InputError": "growkit.base.errors",
    "Inspection": "growkit.pipeline.inspection",
    "ProbeResult": "growkit.results.probe",
    "ProbeSettings": "growkit.probing.settings",
    "Progress": "growkit.base.progress",
    "Recipe": "growkit.recipe.recipe",
    "Settings": "growkit.base.settings",
    "VerifyResult": "growkit.results.proof",
    "check": "growkit.pipeline.checking",
    "convert": "growkit.pipeline.one_step",
    "grow": "growkit.pipeline.one_step",
    "infer": "growkit.inference.inferring",
    "inspect": "growkit.pipeline.inspection",
    "load": "growkit.distributed.loading",
    "load_recipe": "growkit.recipe.files",
    "plan": "growkit.pipeline.ahead",
    "probe": "growkit.probing.probe",
    "run": "growkit.pipeline.surgery",
    "verify": "growkit.proof.verdict",
}
_MODULES = ("distributed", "results", "training")
__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> "Any":
    # Imported when asked for: ``growkit --help`` must not wait for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"growkit.{name}")
    raise AttributeError(f"module 'growkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
