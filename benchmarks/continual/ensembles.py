"""Runs of one arm, or of one source, with several seeds and rates, trained at once.

One small model leaves an accelerator idle: it waits for the launch of the next kernel. So the
parameters of all runs are stacked, ``torch.func.vmap`` computes them in one pass, and on a GPU a
CUDA graph repeats the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from benchmarks.continual.runs import PARTS, Run, Segment
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)
from growkit.extras.probing.harness import Look, computing, isolated, window_numbers

WARMING_STEPS = 3
"""Steps before a CUDA graph is recorded, so that libraries have taken their workspaces."""

WINDOWS = 64
"""Held-out windows of a forward pass."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of GPUs without whole maps, which torch does not choose under vmap."""
    assert key.shape == query.shape
    causal = torch.ops.aten._scaled_dot_product_efficient_attention
    output = causal(query, key, value, None, True, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def all_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Every expert for every token: no copies of weights for tokens, and nothing waits for a value.

    Args:
        module: gated experts without biases, as in Mixtral.
        hidden_states: [tokens, hidden].
        top_k_index: experts of a token, [tokens, top_k].
        top_k_weights: their weights, [tokens, top_k].
    """
    experts = torch.arange(module.num_experts, device=top_k_index.device)
    chosen = top_k_index[..., None] == experts  # [tokens, top_k, experts]
    weights = (chosen * top_k_weights[..., None]).sum(-2)  # [tokens, experts]
    gated = torch.einsum("th,eih->eti", hidden_states, module.gate_up_proj)
    inner = module._apply_gate(gated) * weights.T[..., None]  # [experts, tokens, intermediate]
    return torch.einsum("eti,ehi->th", inner, module.down_proj).to(hidden_states.dtype)


AttentionInterface.register("efficient", attend)
ExpertsInterface.register("all", all_experts)


class Ensemble:
    """Runs on their way.

    Attributes:
        runs: of the same arm or source, with the same source's rate; without ramps.
        flat: all parameters, [runs, parameters], in float32.
        average: AdamW's running mean of gradients, in the same shape.
        square: AdamW's running mean of squared gradients, likewise.
        updates: number of AdamW's updates, likewise; growth may have added some without any.
        diverged: the step of the segment in which a run's loss was not finite, [runs]; the
            segment's length if there was none.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, first = runs, runs[0]
        self.model, self.device = first.model, torch.device(first.device)
        self.dtype, scale = first.job.experiment.scale.dtype, first.job.experiment.scale
        self.named = dict(self.model.named_parameters())
        if self.device.type == "cuda" and not isinstance(self.model, DiffTransformerForCausalLM):
            self.model.set_attn_implementation("efficient")
        if self.model._can_set_experts_implementation():
            self.model.set_experts_implementation("all")
        stacked = [torch.stack(each) for each in zip(*map(_vectors, runs), strict=True)]
        self.flat, self.average, self.square, self.updates = stacked[:4]
        self.rates, self.decays, self.epsilons = stacked[4:]
        self.flat.requires_grad_()
        self.betas = scale.betas
        self.windows = first.windows.to(self.device)
        longest = max(each.end - each.begin for each in first.segments)
        self.order = torch.zeros(longest, len(runs) * scale.batch, dtype=torch.long)
        self.order = self.order.to(self.device)
        self.factors = torch.zeros(longest, device=self.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.device)
        self.diverged = torch.zeros(len(runs), dtype=torch.long, device=self.device)
        self.step = self._recorded() if self.device.type == "cuda" else self._step

    def finish(self) -> list[dict[str, Any]]:
        """Train to the end.

        Returns:
            The lines of the runs, without their keys.
        """
        began = time.perf_counter()
        lines = [run.begun() for run in self.runs]
        with isolated(self.device, 0), sdpa_kernel(SDPBackend.MATH):
            for segment in self.runs[0].segments:
                for run, line, looks in zip(self.runs, lines, self._train(segment), strict=True):
                    run.note(line, segment, looks)
        self._hand_back()
        seconds = round((time.perf_counter() - began) / len(lines), 1)
        return [{**line, "seconds": seconds} for line in lines]

    def _train(self, segment: Segment) -> list[list[Look]]:
        """Take the steps of a segment; a branch leaves the trunk as it was."""
        branch, first = segment.point is not None, self.runs[0]
        steps = range(segment.begin, segment.end)
        looks = {segment.end} if branch else {*first.looks}
        state = (self.flat, self.average, self.square, self.updates)
        kept = [each.detach().clone() for each in state] if branch else []
        numbers = torch.stack([_numbers(run, steps) for run in self.runs], 1)
        self.order[: len(steps)] = numbers.flatten(1).to(self.device)
        factors = [segment.factor(step, first.warmup) for step in steps]
        self.factors[: len(steps)] = torch.tensor(factors)
        self.at.zero_()
        self.diverged.fill_(len(steps))
        found = [self._look(0, branch)] if steps.start == 0 and 0 in looks else []
        for step in steps:
            self.step()
            if step + 1 in looks:
                found.append(self._look(step + 1, branch))
        with torch.no_grad():
            for each, before in zip(state, kept, strict=False):
                each.copy_(before)
        every = [[*looks] for looks in zip(*found, strict=True)] or [[] for _ in self.runs]
        for looks, place in zip(every, self.diverged.tolist(), strict=True):
            if place < len(steps):
                stop = steps.start + place
                looks[:] = [*(look for look in looks if look.step <= stop), Look(stop, None)]
        return every

    def _look(self, step: int, branch: bool) -> list[Look]:
        """What a single run measures, of every run."""
        scale = self.runs[0].job.experiment.scale
        parts = PARTS if branch else PARTS[:1]
        windows = scale.windows if branch else scale.look_windows
        losses = {part: self._held_out(part, windows) for part in parts}
        found = []
        for number in range(len(self.runs)):
            of_run: Any = {part: each[number] for part, each in losses.items()}
            finite = all(abs(each) < float("inf") for each in of_run.values())
            of_run = of_run if branch else of_run[PARTS[0]]
            found.append(Look(step, of_run if finite else None))
        return found

    def _held_out(self, part: str, count: int) -> list[float]:
        """Nats per token on held-out windows, of every run."""
        context = self.runs[0].job.experiment.scale.context
        held_out = self.runs[0].text.held_out(part, count, context).to(self.device)
        with torch.no_grad():
            losses = [
                self._losses(self.flat, ids.expand(len(self.runs), *ids.shape)).double() * len(ids)
                for ids in held_out.split(WINDOWS)
            ]
        each: list[float] = (torch.stack(losses).sum(0) / len(held_out)).tolist()
        return each

    def _losses(self, flat: Tensor, ids: Tensor) -> Tensor:
        """Mean nats per token of every run's windows, [runs, windows, length] to [runs]."""

        def loss(flat: Tensor, ids: Tensor) -> Tensor:
            cut = flat.split([each.numel() for each in self.named.values()])
            values = {
                name: part.view_as(each)
                for (name, each), part in zip(self.named.items(), cut, strict=True)
            }
            with computing(self.device, self.dtype):
                logits = functional_call(self.model, values, (ids,), {"use_cache": False}).logits
            return nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
            )

        return vmap(loss)(flat, ids)

    def _step(self) -> None:
        """A step of AdamW, as torch takes it; its place among the steps is on the device."""
        numbers = self.order.index_select(0, self.at).flatten()
        ids = self.windows.index_select(0, numbers).unflatten(0, (len(self.runs), -1))
        losses = self._losses(self.flat, ids)
        (gradient,) = torch.autograd.grad(losses.sum(), self.flat)
        first, second = self.betas
        with torch.no_grad():
            lost = torch.where(losses.isfinite(), self.diverged, self.at)
            torch.minimum(self.diverged, lost, out=self.diverged)
            rates = self.rates * self.factors.index_select(0, self.at)
            self.updates += 1
            self.average.lerp_(gradient, 1 - first)
            self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            roots = (self.square / (1 - second**self.updates)).sqrt().add_(self.epsilons)
            self.flat.mul_(1 - rates * self.decays)
            self.flat.sub_(rates / (1 - first**self.updates) * self.average / roots)
            self.at += 1

    def _recorded(self) -> Callable[[], None]:
        """A step as a CUDA graph."""
        state = (self.flat, self.average, self.square, self.updates, self.at, self.diverged)
        kept = [each.detach().clone() for each in state]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with isolated(self.device, 0), sdpa_kernel(SDPBackend.MATH):
            with torch.cuda.stream(stream):
                for _ in range(WARMING_STEPS):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                self._step()
        with torch.no_grad():
            for each, before in zip(state, kept, strict=True):
                each.copy_(before)
        return graph.replay

    def _hand_back(self) -> None:
        """Give every run its parameters and its optimizer's state."""
        rows = zip(self.flat.detach(), self.average, self.square, self.updates, strict=True)
        for run, row in zip(self.runs, rows, strict=True):
            at = 0
            for parameter in run.model.parameters():
                end = at + parameter.numel()
                values, *means = (each[at:end].view_as(parameter).clone() for each in row[:3])
                parameter.data.copy_(values)
                count = row[3][at].cpu().clone()
                state = {"step": count, "exp_avg": means[0], "exp_avg_sq": means[1]}
                run.optimizer.state[parameter] = state
                at = end


def _vectors(run: Run) -> list[Tensor]:
    """Parameters, AdamW's state, rates, decays and epsilons of a run, each [parameters]."""
    groups = {id(each): group for group in run.optimizer.param_groups for each in group["params"]}
    found: list[list[Tensor]] = [[] for _ in range(7)]
    for parameter in run.model.parameters():
        state, group = run.optimizer.state[parameter], groups[id(parameter)]
        numbers = [state.get(key, 0.0) for key in ("exp_avg", "exp_avg_sq", "step")]
        numbers += [group[key] for key in ("lr", "weight_decay", "eps")]
        zeros = torch.zeros_like(parameter)
        for column, each in zip(
            found, [parameter, *(zeros + each for each in numbers)], strict=True
        ):
            column.append(each.detach().flatten())
    return [torch.cat(each).to(run.device, torch.float32) for each in found]


def _numbers(run: Run, steps: range) -> Tensor:
    """Numbers of the windows of a run's steps, [steps, size]."""
    size = run.job.experiment.scale.batch
    first = (run.first_step + steps.start) * size
    every = window_numbers(len(run.windows), run.job.seed, first, len(steps) * size)
    return every.view(len(steps), size)
