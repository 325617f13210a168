"""Memory of the proof of a model and of what it grew to.

    python benchmarks/proof_memory.py [--pairs 12x1 24x1] [--families 6x1] [--folder FOLDER]

A random float32 Llama (hidden 2048, ffn 5632, 12 layers, 16 heads, vocabulary 32000: 3 GB) is grown
by two to 11 GB, without the proof. Then `growkit verify` runs on 8 random prompts of 512 tokens,
and its peak of resident memory is taken. So it is for a pair twice as deep, which should need the
same. Files that are mapped count while they are looked at.

Then a GPT-NeoX, whose files name a tensor otherwise than its class, and a Mixtral, whose files hold
experts one by one where its class has them in one tensor, are verified against themselves, and so
is a Llama of as many parameters: on few tokens, all should need about the same.

Needs about 27 GB of disk, and prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measuring import Run, apart, growkit, head, machine, row, size_of

FAMILIES = ("Llama", "GPT-NeoX", "Mixtral")
"""Whose proofs are compared, with that of the first."""


def config_of(family: str, layers: int, scale: int, vocabulary: int) -> Any:
    """Configs of models with as many parameters, but for biases, norms and routers."""
    from transformers import GPTNeoXConfig, LlamaConfig, MixtralConfig

    hidden, ffn = 2048 // scale, 5632 // scale
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 16, "dtype": "float32"}
    if family == "GPT-NeoX":
        return GPTNeoXConfig(**sizes, intermediate_size=3 * ffn // 2)
    if family == "Mixtral":
        kinds = {"num_key_value_heads": 16, "head_dim": hidden // 16}
        return MixtralConfig(**sizes, **kinds, intermediate_size=ffn // 8, num_local_experts=8)
    return LlamaConfig(**sizes, intermediate_size=ffn)


def make_source(folder: Path, family: str, layers: int, scale: int, vocabulary: int) -> None:
    """Write a random model tensor by tensor as transformers names them, one shard for each."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, layers, scale, vocabulary))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = revert_weight_conversion(model, dict(model.named_parameters()))
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, (name, empty) in enumerate(tensors.items()):
        norm = empty.dim() == 1 and name.endswith("weight")
        tensor = torch.randn(empty.shape, generator=generator).mul_(0.1 if norm else 0.02)
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor + norm}, folder / file, {"format": "pt"})
        weight_map[name] = file
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def verified(source: Path, target: Path, prompts: int, length: int) -> Run:
    amount = ("--prompts", prompts, "--length", length, "--device", "cpu", "--json")
    return growkit("verify", source, target, *amount)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    form = "layers x the divisor of the width"
    parser.add_argument("--pairs", nargs="*", default=["12x1", "24x1"], help=form)
    parser.add_argument("--families", nargs="*", default=["6x1"], help=form)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    chosen = parser.parse_args()
    print(machine())
    print(head("hidden", "layers", "source, GB", "target, GB", "s", "peak memory, GB"))
    for pair in chosen.pairs:
        layers, scale = map(int, pair.split("x"))
        with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
            source, grown = Path(scratch) / "source", Path(scratch) / "grown"
            source.mkdir()
            apart(make_source, source, "Llama", layers, scale, 32000)
            growkit("grow", source, grown, "--hidden", "x2", "--no-verify")
            proof = verified(source, grown, 8, 512)
            sizes = [f"{size_of(each) / 1e9:.2f}" for each in (source, grown)]
            figures = f"{proof.seconds:.0f}", f"{proof.peak / 1e9:.2f}"
            print(row(2048 // scale, layers, *sizes, *figures), flush=True)
    print(head("family", "hidden", "layers", "GB", "s", "peak memory, GB", "× Llama's"))
    for model in chosen.families:
        layers, scale = map(int, model.split("x"))
        of_llama = 0
        for family in FAMILIES:
            with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
                folder = Path(scratch)
                apart(make_source, folder, family, layers, scale, 4000)
                proof = verified(folder, folder, 1, 64)  # then layers are what takes memory
                of_llama = of_llama or proof.peak
                figures = f"{size_of(folder) / 1e9:.2f}", f"{proof.seconds:.0f}"
                peaks = f"{proof.peak / 1e9:.2f}", f"{proof.peak / of_llama:.2f}"
                print(row(family, 2048 // scale, layers, *figures, *peaks), flush=True)


if __name__ == "__main__":
    main()
