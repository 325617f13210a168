"""Models of an experiment: the source, what growkit makes of it, their optimizers and compute.

A training step takes three times the FLOPs of a forward pass. The forward pass takes, per token,

    2 · Σ elements of matrices  +  (context + 1) · Σ over attention heads (head_dim + value width)

- Matrices are all that a token is multiplied with: the output head counts (tied or not), reading
  the embedding does not; of experts, those that a token uses.
- A head multiplies its query with the keys so far (head_dim) and its map with their values (value
  width); a token sees (context + 1) / 2 keys on average, and a product with n of them takes 2 · n.
  Noise heads count like signal heads; an integral (DINT) adds one product with values per signal
  head.
- Norms, softmax, rotations, activations and the optimizer are left out, as is usual.

``growkit probe`` counts the products of any model instead, with whole maps of attention.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import growkit
from benchmarks.continual.experiment import Arm, Experiment, Job, Scale
from benchmarks.continual.text import Text
from growkit.engine.transformers_class import fit_experts
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.planning.recipe import STEPS

growkit.register_own_classes()

OPTIMIZER = "optimizer.pt"
SPREAD = 0.55
"""Standard deviation of new weights, times √hidden: 0.02 at a hidden size of 768."""


def training_flops(model: Any, context: int) -> int:
    """FLOPs of a training step, per token."""
    return 3 * forward_flops(model, context)


def forward_flops(model: Any, context: int) -> int:
    """FLOPs of a forward pass, per token; see above."""
    config = model.config
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 1))
    chosen = getattr(config, "num_experts_per_tok", 1) if experts > 1 else 1
    head = model.get_output_embeddings()
    ends = {id(model.get_input_embeddings().weight), id(head.weight)}
    total = head.weight.numel()
    for parameter in model.parameters():
        if id(parameter) not in ends and parameter.dim() > 1:
            of_experts = parameter.dim() == 3
            total += parameter.numel() * chosen // experts if of_experts else parameter.numel()
    return 2 * total + (context + 1) * config.num_hidden_layers * attention_width(config)


def attention_width(config: Any) -> int:
    """Sum of head dims and value widths of the maps that a token uses in one layer."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == "diff_transformer":
        width = config.value_head_dim
        integral = config.num_signal_heads * width if config.integral != "none" else 0
        return int(heads * (head_dim + width) + integral)
    return int(heads * head_dim * (3 if config.model_type == "diffllama" else 2))


def source_flops(experiment: Experiment, name: str) -> int:
    """FLOPs that a source is trained with."""
    scale = experiment.scale
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config_of(scale, experiment.sources[name].model, {})
        )
    return experiment.source_tokens(name) * training_flops(model, scale.context)


def config_of(scale: Scale, model: str, replaced: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of one of the scale's models: a Llama if it is softmax, else DIFF."""
    kind = LlamaConfig if model == "softmax" else DiffTransformerConfig
    settings = {
        "vocab_size": scale.vocabulary,
        "max_position_embeddings": scale.context,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "use_cache": False,
    }
    return kind(**{**settings, **scale.models[model], **replaced})  # type: ignore[arg-type]


def drawn(config: PreTrainedConfig, seed: int) -> Any:
    """A model with new weights, in float32."""
    config.initializer_range = SPREAD / config.hidden_size**0.5
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shape_of(experiment: Experiment, arm: Arm, text: Text, work: Path) -> PreTrainedConfig:
    """The config of an arm with new weights, as growkit writes it."""
    model = experiment.sources[arm.source].model
    config = config_of(experiment.scale, model, arm.model)
    if arm.equal == "parameters":  # fit the width of the MLP
        with torch.device("meta"):
            pair = config, config_of(experiment.scale, model, {})
            have, want = (AutoModelForCausalLM.from_config(each).num_parameters() for each in pair)
        each = 3 * config.hidden_size * config.num_hidden_layers
        config.intermediate_size += round((want - have) / each)
    if not arm.steps:
        return config
    write(drawn(config, 0), text, work / "shape")
    apply(arm.steps, work / "shape", work / "made", text, seed=0, state=None)
    return AutoConfig.from_pretrained(work / "made")


def write(model: Any, text: Text, folder: Path) -> None:
    """A model folder with its tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text.folder / name, folder)


def hand_on(model: Any, optimizer: torch.optim.Optimizer, text: Text, folder: Path) -> None:
    """Write a trained source with its optimizer, whole or not at all."""
    unfinished = folder.with_name(f".{folder.name}")
    for each in (unfinished, folder):
        shutil.rmtree(each, ignore_errors=True)
    write(model, text, unfinished)
    torch.save(optimizer.state_dict(), unfinished / OPTIMIZER)
    os.replace(unfinished, folder)


def apply(
    steps: Sequence[Mapping[str, Any]],
    source: Path,
    output: Path,
    text: Text,
    seed: int,
    state: Path | None,
) -> None:
    """Carry steps out with growkit.

    Args:
        steps: as in a recipe; the value ``TEXT`` is a text to calibrate on.
        source: a model folder.
        output: a folder to make; replaced if it exists.
        text: of the experiment.
        seed: of random splits.
        state: of the source's optimizer, to grow as well; None for none.
    """
    calibration = str(text.folder / "calibration.txt")
    made = []
    for each in steps:
        (verb,) = each.keys() & STEPS.keys()
        options = {key: calibration if value == "TEXT" else value for key, value in each.items()}
        made.append(STEPS[verb](options.pop(verb), options))
    optimizer = None if state is None else str(state)
    recipe = growkit.Recipe(
        str(source), tuple(made), str(output), verify=None, seed=seed, optimizer=optimizer
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    growkit.run(recipe, overwrite=True)


def begin(job: Job, text: Text, work: Path, source: Path | None) -> tuple[Any, torch.optim.AdamW]:
    """The model of a run in float32, and its optimizer.

    Args:
        job: the run.
        text: of the experiment.
        work: folder of the run, where models are made.
        source: folder of the trained source; None for a source, and for new weights.
    """
    experiment, arm, scale = job.experiment, job.arm, job.experiment.scale
    law = state = None
    if arm is None or arm.weights == "new":
        model_of = experiment.sources[job.name].model if arm is None else ""
        shape = shape_of(experiment, arm, text, work) if arm else config_of(scale, model_of, {})
        model = drawn(shape, job.seed)
    else:
        assert source is not None
        folder = work / "made" if arm.steps else source
        if arm.optimizer == "law":
            state = folder / OPTIMIZER
        if arm.steps:
            grown = source / OPTIMIZER if state else None
            apply(arm.steps, source, folder, text, job.seed, grown)
            law = folder if arm.optimizer != "plain" else None
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fit_experts(model)
    groups = growkit.training.param_groups(
        model,
        law,
        lr=job.rate,
        weight_decay=scale.weight_decay,
        eps=scale.eps,
        decays=lambda _, parameter: parameter.dim() > 1,
    )
    return model, adamw(model, groups, scale.betas, state)


def adamw(
    model: Any, groups: list[dict[str, Any]], betas: tuple[float, float], state: Path | None
) -> torch.optim.AdamW:
    """The optimizer with a state from a file; rates and decay are those of the groups."""
    optimizer = torch.optim.AdamW(groups, betas=betas)
    if state is None:
        return optimizer
    saved = torch.load(state, weights_only=True)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if all("param_names" in group for group in saved["param_groups"]):  # as growkit writes them
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        number_of = dict(zip(names, numbers, strict=True))
        of = {id(each): name for name, each in model.named_parameters()}
        numbers = [number_of[of[id(each)]] for each in parameters]
    found = enumerate(numbers)
    moments = {place: saved["state"][n] for place, n in found if n in saved["state"]}
    own = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": own})
    for parameter, each in optimizer.state.items():
        assert each["exp_avg"].shape == parameter.shape, "the state of another parameter"
    return optimizer
