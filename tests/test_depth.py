"""Growth in depth: random models of all families, judged by transformers in strict float64."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import growkit
from growkit import ConvertStep, GrowStep, Recipe
from growkit.engine.recipe_planning import plan_recipe
from growkit.extras.depth.growth.depth import arrangement
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import Layer, families, rearranged
from tests import architectures
from tests.families import CONFIGS, IDENTITY, Config, coin, save_lively
from tests.files import edit_config, edit_json, edit_weights, listed
from tests.models import Make, relative_error, save_model, seeded

QUICK = growkit.Settings(prompts=1, length=16)
FEW = {"prompts": 1, "length": 12}
GROW: dict[str, Any] = {"method": "depth", "verify": False}


LAYERS = 4

LINEAR = ("granitemoehybrid", "kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
KINDS = {"lfm2": "conv"} | dict.fromkeys(LINEAR, "linear_attention")
"""By type, a kind of layers that is neither full attention nor attention with a window."""


class Deep:
    """A random model of a kind, and what is to become of it."""

    def __init__(self, kind: str, seed: int) -> None:
        choose = seeded(seed)
        self.kind, self.seed = kind, seed
        self.config = CONFIGS[kind](choose)
        self.config["num_hidden_layers"] = LAYERS
        if "layer_types" in self.config:
            linear = "linear_attention" in self.config["layer_types"]
            kinds = ["full_attention", "linear_attention" if linear else "sliding_attention"]
            self.config["layer_types"] = [choose.choice(kinds) for _ in range(LAYERS)]
            if linear:  # the class counts tokens in a layer with attention
                self.config["layer_types"][-1] = "full_attention"
            if coin(choose):  # what the class makes of the number of a layer
                del self.config["layer_types"]
        if "no_rope_layers" in self.config:
            self.config["no_rope_layers"] = [int(coin(choose)) for _ in range(LAYERS)]
            if coin(choose):
                self.config |= {"no_rope_layers": None, "no_rope_layer_interval": 2}
        if kind in ("qwen2", "qwen3", "qwen2_moe"):
            used = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
            self.config |= used if coin(choose) else {}
        if "mlp_only_layers" in self.config:
            self.config["mlp_only_layers"] = choose.choice([[], [0], [1, 3]])
        if "first_k_dense_replace" in self.config:
            self.config["first_k_dense_replace"] = choose.choice([0, 1, 2])
        self.config |= {key: on for key, on in IDENTITY.items() if key in self.config}
        self.dtype = choose.choice([torch.float32, torch.bfloat16])
        if self.config.get("hidden_size", 8) % 8:  # products with experts need whole 16 bytes
            self.dtype = torch.float32
        self.without_lists = coin(choose)
        ways: list[Config] = [{"layers": "x1.5"}, {"layers": "x2"}, {"layers": 5, "place": "end"}]
        ways += [{"place": [0, 1, 1, 3]}, {"layers": 5, "place": choose.choice([0, 1, 2])}]
        self.options = choose.choice(ways)

    def save(self, folder: Path) -> Path:
        """The model, as transformers saves it; or as files from before lists were written."""
        save_lively(folder, self.kind, self.config, self.seed, self.dtype)
        if self.without_lists:
            with edit_json(folder / "config.json") as config:
                for key in ("layer_types", "no_rope_layers"):
                    if self.config.get(key) is None:
                        config.pop(key, None)
                every = "full_attention_interval"
                config |= {every: self.config[every]} if every in self.config else {}
        return folder

    def grow(self, folder: Path, **more: Any) -> tuple[Path, Path]:
        """The source and what it became."""
        source, out = self.save(folder / "source"), folder / "out"
        growkit.grow(source, out, method="depth", **{"verify": False, **self.options, **more})
        return source, out

    def new(self, source: Path) -> list[int]:
        """The numbers of the new layers."""
        recipe = Recipe(str(source), (GrowStep("depth", **self.options),), "nowhere")
        layers = plan_recipe(recipe, Checkpoint(source)).lineage.layers
        assert layers is not None
        return [place for place, layer in enumerate(layers) if layer.idle]


def spoiled(folder: Path, layer: int, choose: Random) -> str:
    """Multiply what a layer writes by 1.5; the name of the tensor."""
    endings = ("o_proj.weight", "dense.weight", "out_proj.weight", "attn.c_proj.weight")
    with edit_weights(folder) as tensors:
        written = [name for name in tensors if f".{layer}." in name and name.endswith(endings)]
        name = choose.choice(sorted(written))
        tensors[name] *= 1.5
    return name


def without_gradient(folder: Path, new: list[int], steps: int = 3) -> list[str]:
    """Parameters of new layers that get no gradient after some steps of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(29, (4, 16), generator=torch.Generator().manual_seed(0))
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        if step < steps:
            optimizer.step()
    return [
        name
        for name, each in model.named_parameters()
        if any(f"s.{layer}." in name or f"h.{layer}." in name for layer in new)
        and (each.grad is None or not each.grad.any())
    ]


@pytest.mark.sampled(1, "qwen3-1")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_any_family(kind: str, seed: int, tmp_path: Path) -> None:
    """Proof, training, and a fault in a layer that was there before, with and without manifest."""
    case = Deep(kind, seed)
    quick = growkit.Settings(prompts=1, length=16, trainability=True)
    source, out = case.grow(tmp_path, verify=quick)
    assert out.is_dir(), "rejected"
    error = relative_error(source, out)
    assert error < 1e-12, f"error {error}"
    new = case.new(source)
    silent = without_gradient(out, new)
    assert not silent, f"no gradient for {silent}"
    choose = seeded(seed)
    total = LAYERS + len(new)
    layer = choose.choice([each for each in range(total) if each not in new])
    name = spoiled(out, layer, choose)
    for manifest in (True, False):
        if not manifest:
            (out / "growkit.json").unlink()
        found = growkit.verify(source, out, prompts=1, length=16)
        assert not found["kept"], f"{name} was spoiled"
        if manifest:
            place = found["fault"] or {"layer": None, "tensor": None}
            assert (place["layer"], place["tensor"]) == (layer, name), f"{name}: {found['fault']}"


@pytest.mark.usage
@pytest.mark.sampled(1, "qwen3_5_text-3")
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("kind", ["cohere2", "gemma3_text", "gpt_oss", "qwen3", *KINDS])
def test_new_layers_of_a_kind(kind: str, seed: int, tmp_path: Path) -> None:
    """Also of one that the source lacks; all of it trains, and a fault in it is noticed."""
    choose, source, out = seeded(seed), tmp_path / "source", tmp_path / "out"
    kinds = ["full_attention", KINDS.get(kind, "sliding_attention")]
    asked = choose.choice(kinds)
    if kind in CONFIGS:
        case = Deep(kind, seed)
        if coin(choose):
            only = kinds[0] if kind in KINDS else choose.choice(kinds)
            case.config["layer_types"] = [only] * LAYERS
        case.config |= {"use_sliding_window": True} if kind == "qwen3" else {}
        case.save(source)
    else:
        architectures.save(kind, source, seed, alternating=True)
    place = {"place": choose.choice([[0], [1, 1, 0]])} if coin(choose) else {"layers": "x2"}
    quick = growkit.Settings(prompts=1, length=16, trainability=True)
    recipe = Recipe(str(source), (GrowStep("depth", kind=asked, **place),), str(out), quick)
    result = growkit.run(recipe)
    assert result["kept"], result["verification"]["reason"]
    assert relative_error(source, out) < 1e-12
    writes = re.compile(r"\.(\d+)\..*(o_proj|out_proj|post_attention_layernorm)\.weight")
    with edit_weights(out) as tensors:
        same = [name for name, tensor in tensors.items() if len(tensor.unique()) == 1]
    idle = {int(found[1]): name for name in same if (found := writes.search(name))}
    types = AutoConfig.from_pretrained(out).layer_types
    assert {types[layer] for layer in idle} == {asked}
    assert not without_gradient(out, [*idle])
    (out / "growkit.json").unlink()
    assert growkit.verify(source, out, **FEW)["kept"]
    with edit_weights(out) as tensors:
        tensors[choose.choice(sorted(idle.values()))].view(-1)[0] += 0.1
    assert relative_error(source, out) > 1e-6
    assert not growkit.verify(source, out, **FEW)["kept"]


def test_lists_are_those_of_the_classes() -> None:
    """What a family says that a config leaves out is what transformers makes of it."""
    compared = 0
    for family in families().values():
        for kind in family.model_types:
            own = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].__module__.startswith("growkit")
            if own or kind not in CONFIG_MAPPING or kind in ("falcon_h1", "mamba"):
                continue
            for seed in range(4):
                choose = seeded(seed)
                given: Any = {"num_hidden_layers": choose.choice([1, 5, 9])}
                given["use_sliding_window"] = choose.random() < 0.7
                given["max_window_layers"] = choose.choice([0, 3, 28])
                given |= choose.choice([{}, {"sliding_window_pattern": 3}])
                given |= choose.choice([{}, {"no_rope_layer_interval": 3}])
                given |= choose.choice([{}, {"sliding_window": None}, {"sliding_window": 4}])
                config = CONFIG_MAPPING[kind](**given)
                assumed = family.filled_in({"model_type": kind, **given})
                for key in ("layer_types", "no_rope_layers", "mlp_only_layers"):
                    assert getattr(config, key, None) == assumed.get(key), (kind, given)
                    compared += assumed.get(key) is not None
    assert compared > 40


WINDOW = {"sliding_window": 4, "num_hidden_layers": 4}


def without_lists(folder: Path) -> Path:
    """The model as software reads it that derives the types of layers from their indices."""
    with edit_json(folder / "config.json") as config:
        for key in ("layer_types", "no_rope_layers"):
            config.pop(key, None)
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"layers": "x2"}, {"layers": "x1.5"}, {"place": "3,3,3"}])
@pytest.mark.parametrize(
    ("kind", "changes"), listed("depth", "types of layers remain what their indices say")
)
def test_types_of_layers_remain_what_their_indices_say(
    kind: str, changes: dict[str, Any], options: dict[str, str], tmp_path: Path
) -> None:
    """Also transformers derives them, in the same way as llama.cpp and MLX, if lists are missing.

    The control puts a layer where the class would have another type, of which the plan warns, if
    no other number derives it.
    """
    case = Deep(kind, 1)
    case.config = {**case.config, **WINDOW, "layer_types": None, **changes}
    source, out = case.save(tmp_path / "source"), tmp_path / "out"
    with edit_json(source / "config.json") as config:
        config |= changes
    assert growkit.grow(source, out, **GROW, **options)["warnings"] == []
    assert relative_error(source, out) < 1e-12
    assert relative_error(source, without_lists(out)) < 1e-12
    if options == {"layers": "x2"} and kind != "qwen2":
        for option in ({"layers": 8, "blocks": "interpose"}, {"place": 0}):
            found = growkit.grow(source, tmp_path / str(option), **GROW, **option)
            written = json.loads((tmp_path / str(option) / "config.json").read_text())
            derived = any(key.endswith(("_pattern", "_interval")) for key in written)
            assert derived or "from the index of a layer" in found["warnings"][0]
        assert relative_error(source, tmp_path / str(option)) < 1e-12
        if kind != "qwen3_5_text":  # its types differ in tensors
            error = relative_error(source, without_lists(tmp_path / str(option)))
            assert error < 1e-12 if derived else error > 1e-6


def test_no_new_layer_hands_keys_and_values_on(make: Make, tmp_path: Path) -> None:
    """In Gemma 4 the last layer of each type does, to other layers or to an assistant."""
    source = make("llama", num_kv_shared_layers=0)
    recipe = Recipe(str(source), (GrowStep("depth", layers="x2"),), "nowhere")
    layers = plan_recipe(recipe, Checkpoint(source)).lineage.layers
    assert [layer.computes for layer in layers or ()] == [None, 0, None, 1]
    growkit.grow(source, tmp_path / "out", **GROW, layers="x1.5")
    assert relative_error(source, tmp_path / "out") < 1e-12
    with pytest.raises(growkit.InputError, match=r"keys and values on.*leave out --place"):
        growkit.grow(source, tmp_path / "other", **GROW, place=1)


@pytest.mark.sampled(1, "bart-interpose")
@pytest.mark.parametrize(("kind", "blocks"), [("mbart", "identity"), ("bart", "interpose")])
def test_caches_have_room_for_new_layers(kind: str, blocks: str, tmp_path: Path) -> None:
    """Their class counts the layers of a cache by the layers of an encoder that it lacks."""
    source, out = architectures.save(kind, tmp_path / "source"), tmp_path / "out"
    growkit.grow(source, out, **GROW, layers="x2", blocks=blocks)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    ids = torch.arange(2, 10)[None]
    said: Any = model.generate(
        ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    )
    assert said.past_key_values.get_seq_length() == 11
    with torch.no_grad():
        logits = model(input_ids=said.sequences, use_cache=False).logits[:, 7:-1]
    assert torch.allclose(torch.stack(said.logits, 1), logits.float(), atol=1e-6)
    if blocks == "identity":
        (out / "growkit.json").unlink()
        assert growkit.verify(source, out, prompts=1, length=12)["kept"]
        edit_config(out, encoder_layers=3)
        assert not growkit.verify(source, out, prompts=1, length=12)["kept"]
    edit_config(source, encoder_layers=3)
    with pytest.raises(growkit.InputError, match=r"encoder_layers.*3.*decoder_layers, 2"):
        growkit.grow(source, tmp_path / "other", **GROW, layers="x2", blocks=blocks)


@pytest.mark.parametrize(
    ("key", "before", "after"), listed("depth", "keys that list layers follow them")
)
def test_keys_that_list_layers_follow_them(key: str, before: Any, after: Any) -> None:
    layers = [Layer(of) for of in (0, 0, 1, 1, 2, 3, 3)]
    assert rearranged({key: before}, layers, 4) == {key: after}


def test_lists_as_long_as_the_layers_are_proved(tmp_path: Path) -> None:
    """That of a class is told from one of tokens by its name, and a proof expects the same."""
    others = {"image_token_ids": [3, 4, 5, 6], "attention_kind": "sdpa"}  # no pattern of letters
    source = save_model(tmp_path / "source", "llama", num_hidden_layers=4)
    edit_config(source, rate_by_layer=[3, 4, 5, 6], **others)
    made = growkit.grow(source, tmp_path / "out", method="depth", layers="x2", verify=QUICK)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rate_by_layer"] == [3, 3, 4, 4, 5, 5, 6, 6]
    assert {key: config[key] for key in others} == others
    assert made["kept"]
    edit_config(tmp_path / "out", image_token_ids=[3, 3, 4, 4, 5, 5, 6, 6])
    assert not growkit.verify(source, tmp_path / "out", QUICK)["kept"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", ["x2", "x1.5"])
def test_a_list_that_is_null_stays_null(layers: str, tmp_path: Path) -> None:
    """LFM2's class reads the places of attention only where ``layer_types`` is null."""
    source = architectures.save("lfm2", tmp_path / "source", alternating=True)
    out = tmp_path / "out"
    growkit.grow(source, out, **GROW, layers=layers)
    assert json.loads((out / "config.json").read_text())["full_attn_idxs"] is None
    assert relative_error(source, out) < 1e-12


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"layers": "12"}, "choose another number of layers"), ({"place": "0"}, "leave out --place")],
)
def test_a_period_that_cannot_stay_is_told_with_a_remedy(
    options: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    source = save_model(tmp_path / "source", "gemma3_text", num_hidden_layers=6, layer_types=types)
    asked = {"kind": "sliding_attention", "dry_run": True, **options}
    (told,) = growkit.grow(source, tmp_path / "out", method="depth", **asked)["warnings"]
    assert "would take layer 5" in told
    assert told.endswith(remedy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "changes", "options", "config"), listed("depth", "keys that go with the layers")
)
def test_keys_go_with_the_layers(
    kind: str, changes: dict[str, Any], options: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    case = Deep(kind, 2)
    case.config |= changes
    source, out = case.save(tmp_path / "source"), tmp_path / "out"
    edit_config(source, **changes)  # also what the class does not read
    growkit.grow(source, out, **GROW, **options)
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert relative_error(source, out) < 1e-12
    if kind == "deepseek_v2":
        (out / "growkit.json").unlink()
        assert growkit.verify(source, out, **FEW)["kept"]


@pytest.mark.parametrize(("options", "order"), listed("depth", "orders"))
def test_orders(options: dict[str, str], order: list[Any]) -> None:
    found = arrangement(4, {"blocks": "identity", **options})
    assert [str(layer.of) if layer.idle else layer.of for layer in found] == order


def run(source: Path, output: Path, *steps: GrowStep | ConvertStep) -> Any:
    return growkit.run(Recipe(str(source), steps, str(output), QUICK))


DEEPER = GrowStep("depth", layers="x1.5")
WIDER = GrowStep("hypercloning", hidden="x2")


@pytest.mark.usage
def test_depth_and_width_and_differences_in_one_recipe(make: Make, tmp_path: Path) -> None:
    """Also copies part in the new layers, if anything parts them; not so when all is kept equal."""
    source = make("llama", num_hidden_layers=2)
    steps = [DEEPER, WIDER, GrowStep("depth", place="0"), ConvertStep("diff-v2"), DEEPER]
    result = run(source, tmp_path / "out", *steps)
    assert result["kept"]
    trained = result["verification"].sections.trainability
    assert (trained["trainable"], trained["idle_layers"]) == (True, 4)
    assert "the 4 new layers start as identity" in trained.findings[0].sentence
    assert relative_error(source, tmp_path / "out") < 1e-12
    kept = GrowStep("hypercloning", hidden="x2", symmetry="keep")
    trained = run(source, tmp_path / "keep", kept, DEEPER)["verification"].sections.trainability
    assert not trained["trainable"]


def test_a_fault_in_a_new_layer(make: Make, tmp_path: Path) -> None:
    source, out = make("llama"), tmp_path / "out"
    result = run(source, out, GrowStep("depth", place="0"))
    assert [each["relative"] for each in result["verification"].sections.logits.by_layer] == [
        0.0
    ] * 4
    name = "model.layers.1.self_attn.o_proj.weight"
    with edit_weights(out) as tensors:
        tensors[name] += 0.1
    found = growkit.verify(source, out, **FEW)
    assert not found["kept"]
    assert (found["fault"]["layer"], found["fault"]["tensor"]) == (1, name)
    (out / "growkit.json").unlink()
    found = growkit.verify(source, out, **FEW)
    assert not found["kept"]


def test_what_a_stack_is_held_to(make: Make, tmp_path: Path) -> None:
    source, out = make("llama"), tmp_path / "out"
    result = run(source, out, GrowStep("depth", layers="x2", blocks="stack"))
    assert result["kept"]
    assert "layers are computed more than once" in result["verification"]["reason"]
    modules = [each["module"] for each in result["verification"].sections.logits.by_layer]
    assert modules == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    name = spoiled(out, 3, seeded(0))
    found = growkit.verify(source, out, **FEW)
    assert (found["kept"], found.sections.weights.first_lost_tensor) == (False, name)


def test_layers_that_compute_nothing_need_no_manifest(make: Make, tmp_path: Path) -> None:
    """Also where the source has such layers itself."""
    first, source, out = make("llama"), tmp_path / "source", tmp_path / "out"
    growkit.grow(first, source, place="0,1", **GROW)
    growkit.grow(source, out, place="1,2", **GROW)
    for folder in (source, out):
        (folder / "growkit.json").unlink()
    found = growkit.verify(source, out, **FEW, trainability=True)
    assert found["kept"], found["reason"]
    assert [each["relative"] for each in found.sections.logits.by_layer] == [
        0.0
    ]  # which layers correspond?
    spoiled(out, 3, seeded(0))
    assert not growkit.verify(source, out, **FEW)["kept"]
