"""Models of an experiment: the source, what is made of it, and the optimizers that go on.

Nothing is grown or converted here: growkit does that with the folders on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import growkit
from benchmarks.continual.experiment import Arm, Experiment, Scale
from benchmarks.continual.text import Text
from growkit.modeling import register
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from growkit.recipe.recipe import STEPS
from growkit.training import param_groups

register()

OPTIMIZER = "optimizer.pt"
SPREAD = 0.55
"""Standard deviation of new weights, times √hidden: 0.02 at a hidden size of 768."""


@dataclass(frozen=True)
class Beginning:
    """What a training begins with.

    Attributes:
        model: in float32.
        groups: of AdamW, with their rates.
        state: of AdamW; None for a new one.
    """

    model: Any
    groups: list[dict[str, Any]]
    state: Path | None


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
    """The config of an arm, as growkit writes it; of new weights, which need no trained source."""
    model = experiment.sources[arm.source].model
    config = config_of(experiment.scale, model, arm.model)
    if arm.equal == "parameters":
        fit(config, config_of(experiment.scale, model, {}))
    if not arm.steps:
        return config
    write(drawn(config, 0), text, work / "shape")
    apply(arm.steps, work / "shape", work / "made", text, seed=0, state=None)
    return AutoConfig.from_pretrained(work / "made")


def fit(config: Any, like: Any) -> None:
    """Give a config the width of MLP with which it has as many parameters as another."""
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(each) for each in (config, like)]
    have, want = (each.num_parameters() for each in models)
    each = 3 * config.hidden_size * config.num_hidden_layers
    config.intermediate_size += round((want - have) / each)


def write(model: Any, text: Text, folder: Path) -> None:
    """A model folder with its tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text.folder / name, folder)


def hand_on(model: Any, optimizer: torch.optim.Optimizer, text: Text, folder: Path) -> None:
    """Write a trained source with its optimizer, whole or not at all."""
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(model, text, unfinished)
    torch.save(optimizer.state_dict(), unfinished / OPTIMIZER)
    shutil.rmtree(folder, ignore_errors=True)
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
        steps: as in a recipe; ``TEXT`` stands for a text to calibrate on.
        source: a model folder.
        output: a folder to make; replaced if it is there.
        text: of the experiment.
        seed: of random splits.
        state: of the source's optimizer, to go along; None for none.
    """
    calibration = str(text.folder / "calibration.txt")
    made = []
    for each in steps:
        (verb,) = each.keys() & STEPS.keys()
        options = {key: calibration if value == "TEXT" else value for key, value in each.items()}
        made.append(STEPS[verb](options.pop(verb), options))
    recipe = growkit.Recipe(
        str(source),
        tuple(made),
        str(output),
        verify=None,
        seed=seed,
        optimizer=None if state is None else str(state),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    growkit.run(recipe, overwrite=True)


def begin(
    experiment: Experiment, arm: Arm, text: Text, work: Path, source: Path, seed: int, rate: float
) -> Beginning:
    """What an arm begins with.

    Args:
        experiment: with the arm.
        arm: which.
        text: of the experiment.
        work: of the run, where models are made.
        source: folder of the trained source; not read for new weights.
        seed: of new weights and random splits.
        rate: the learning rate, as the source would have it.
    """
    scale = experiment.scale
    if arm.weights == "new":
        model = drawn(shape_of(experiment, arm, text, work), seed)
        return Beginning(model, plain_groups(model, scale, rate), None)
    with_state = arm.optimizer == "law"
    folder = source
    if arm.steps:
        folder = work / "made"
        state = source / OPTIMIZER if with_state else None
        apply(arm.steps, source, folder, text, seed, state)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if arm.steps and arm.optimizer != "plain":
        groups = param_groups(
            model,
            folder,
            lr=rate,
            weight_decay=scale.weight_decay,
            eps=scale.eps,
            decays=lambda _, parameter: parameter.dim() > 1,
        )
    else:
        groups = plain_groups(model, scale, rate)
    return Beginning(model, groups, folder / OPTIMIZER if with_state else None)


def plain_groups(model: Any, scale: Scale, rate: float) -> list[dict[str, Any]]:
    """One rate for all; matrices decay, vectors do not."""
    parameters = list(model.parameters())
    common = {"lr": rate, "eps": scale.eps}
    decayed = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": scale.weight_decay, **common},
        {"params": others, "weight_decay": 0.0, **common},
    ]


def adamw(beginning: Beginning, scale: Scale) -> torch.optim.AdamW:
    """The optimizer, with the state that goes on; rates and decay are those of the groups."""
    optimizer = torch.optim.AdamW(beginning.groups, betas=scale.betas)
    if beginning.state is None:
        return optimizer
    saved = torch.load(beginning.state, weights_only=True)
    groups = saved["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if all("param_names" in group for group in groups):  # as growkit writes them
        names = [name for group in groups for name in group["param_names"]]
        number_of = dict(zip(names, numbers, strict=True))
        of = {id(each): name for name, each in beginning.model.named_parameters()}
        numbers = [number_of[of[id(each)]] for each in parameters]
    state = {
        place: saved["state"][number]
        for place, number in enumerate(numbers)
        if number in saved["state"]
    }
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    for parameter, each in optimizer.state.items():
        assert each["exp_avg"].shape == parameter.shape, "the state of another parameter"
    return optimizer


def file_name(name: str) -> str:
    """An arm's name as that of a folder."""
    return "".join(each if each.isalnum() else "-" for each in name)
