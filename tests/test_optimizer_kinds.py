"""States of optimizers as people make them: what is legal goes on, the rest is told."""

import importlib
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.extras.formats.distributed_file import CLASSES
from growkit.extras.optimizer.param_groups import Parameters
from growkit.extras.optimizer.state import open_state
from growkit.model.checkpoint.reading import Checkpoint
from tests.files import folder_bytes
from tests.models import load_strict, same_bits, save_model
from tests.test_optimizer_state import (
    FLAT,
    grown,
    largest,
    muon,
    save_distributed,
    save_torch,
    step,
    trained,
)

LLAMA = {"num_hidden_layers": 1}
Make = Callable[[Any], torch.optim.Optimizer]
RATES = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}


def backwards(model: Any) -> torch.optim.Optimizer:
    """Groups in no order that one would guess, with names."""
    return torch.optim.AdamW(list(model.named_parameters())[::-1], **RATES)


def undecayed_first(model: Any) -> torch.optim.Optimizer:
    vectors = [each for each in model.parameters() if each.dim() < 2]
    matrices = [each for each in model.parameters() if each.dim() > 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    return torch.optim.AdamW(groups, **RATES)


def of_tensors(model: Any) -> torch.optim.Optimizer:
    rate, *betas = torch.tensor([RATES["lr"], 0.9, 0.999], dtype=torch.float64)
    options: Any = RATES | {"lr": rate, "betas": betas}
    return torch.optim.AdamW(model.parameters(), **options, foreach=False)


LEGAL: dict[str, Make] = {
    "decay in the gradient": lambda model: torch.optim.Adam(model.parameters(), **RATES),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), **RATES, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), **RATES, fused=True),
    "tensors": of_tensors,
    "names": backwards,
    "vectors first": undecayed_first,
    "each by itself": lambda model: torch.optim.AdamW(
        [{"params": [each]} for each in model.parameters()], **RATES
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LEGAL)
def test_they_go_on_with_what_the_file_says(kind: str, tmp_path: Path) -> None:
    """Nothing is given to the grown model's optimizer but what stands in its file."""
    tied = kind in ("names", "amsgrad")
    source = save_model(
        tmp_path / "source", "llama", dtype=torch.float64, tie_word_embeddings=tied, **LLAMA
    )
    model = load_strict(source)
    optimizer = LEGAL[kind](model)
    step(model, optimizer, 0)
    model.save_pretrained(source)
    out = tmp_path / "out"
    grown(source, save_torch(model, optimizer, tmp_path / "state"), out)
    large = load_strict(out)
    content = torch.load(out / "optimizer.pt", weights_only=True)
    named = dict(large.named_parameters())
    groups = [{"params": [named[n] for n in g["param_names"]]} for g in content["param_groups"]]
    new = type(optimizer)(groups)
    new.load_state_dict(content)
    for number in (1, 2):
        step(model, optimizer, number)
        step(large, new, number)
    model.save_pretrained(source)
    grown(source, None, tmp_path / "expected")
    expected = load_strict(tmp_path / "expected").state_dict()
    assert largest(large.state_dict(), expected) < 1e-12


@pytest.mark.parametrize(
    ("decay", "warned"), [(0.1, True), (0.0, False), (torch.tensor(0.1), True)]
)
def test_decay_of_an_older_torch_is_taken_for_that_of_adamw_by_name(
    decay: Any, warned: bool, source: Path, stepped: Any, tmp_path: Path
) -> None:
    """Before 2.7, groups of Adam and of AdamW had the same options."""
    content = deepcopy(stepped)
    for group in content["param_groups"]:
        del group["decoupled_weight_decay"]
        group["weight_decay"] = decay
    torch.save(content, tmp_path / "state.pt")
    growth: Any = {"hidden": "x2", "optimizer": tmp_path / "state.pt", "dry_run": True}
    warnings = growkit.grow(source, tmp_path / "out", **growth)["warnings"]
    assert ["set decoupled_weight_decay to False" in each for each in warnings] == [True] * warned


def test_squares_in_float16_do_not_vanish(source: Path, stepped: Any, tmp_path: Path) -> None:
    content = deepcopy(stepped)
    for kept in content["state"].values():
        kept["exp_avg_sq"] = torch.full_like(kept["exp_avg_sq"], 6e-8).half()
        kept["exp_avg"] = kept["exp_avg"].half()
    torch.save(content, tmp_path / "state.pt")
    grown(source, tmp_path / "state.pt", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert all((each["exp_avg_sq"] > 0).all() for each in written["state"].values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3.0])], ids=repr)
def test_steps_are_counted_in_any_form(
    count: Any, source: Path, stepped: Any, tmp_path: Path
) -> None:
    """torch up to 1.11 counted them in ints, as other engines do."""
    content = deepcopy(stepped)
    for kept in content["state"].values():
        kept["step"] = count
    torch.save(content, tmp_path / "state.pt")
    grown(source, tmp_path / "state.pt", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert all(same_bits(each["step"], torch.tensor(3.0)) for each in written["state"].values())


def test_moments_of_eight_bits_are_named(source: Path, tmp_path: Path) -> None:
    """torchao's are tensors of a class of its own around two others."""
    optim = pytest.importorskip("torchao.optim")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    content = torch.optim.AdamW(model.parameters()).state_dict()
    moments = optim.subclass_8bit.OptimState8bit.zeros((64, 64), block_size=64)
    content["state"][0] = {"step": torch.tensor(1.0), "exp_avg": moments, "exp_avg_sq": moments}
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(InputError, match="class OptimState8bit has no numbers of its own"):
        grown(source, tmp_path / "state.pt", tmp_path / "out")


def option(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["param_groups"][0].__setitem__(key, value)


def as_deepspeed(content: Any, **options: Any) -> None:
    """Options as DeepSpeed's and Apex's fused optimizers have them."""
    for group in content["param_groups"]:
        kept = {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
        group.clear()
        group.update(kept, bias_correction=True, **options)


def moment(kind: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["state"][3].__setitem__(kind, value)


def without(content: Any, *kinds: str) -> None:
    for kept in content["state"].values():
        for kind in kinds:
            del kept[kind]


def as_sgd(content: Any) -> None:
    kept = {n: {"momentum_buffer": each["exp_avg"]} for n, each in content["state"].items()}
    content["state"] = kept
    content["param_groups"] = [{"params": list(kept), "momentum": 0.9, "dampening": 0}]


def without_the_last(content: Any) -> None:
    content["state"].pop(content["param_groups"][0]["params"].pop())


EIGHT_BITS = {"state1": torch.zeros(16, 16, dtype=torch.uint8), "absmax1": torch.zeros(1)}
FIRST = r"model\.embed_tokens\.weight"
NAME = r"model\.layers\.0\.self_attn\.v_proj\.weight"
ILLEGAL: list[tuple[Callable[[Any], Any], str]] = [
    (option("lr", float("nan")), "lr of a group"),
    (option("lr", "fast"), "lr of a group"),
    (option("lr", None), "lr of a group"),
    (option("amsgrad", True), rf"no max_exp_avg_sq of {FIRST}, whose group has amsgrad"),
    (lambda content: content["param_groups"][0].pop("lr"), "in a group without lr"),
    (option("eps", -1.0), "eps of a group"),
    (option("betas", (0.9, 1.0)), "betas of a group"),
    (moment("step", 10**400), "the step of .* is 1000"),
    (moment("step", torch.tensor(-1.0)), "is -1;"),
    (moment("step", 0.5), "is 0.5;"),
    (lambda content: content["state"][3].pop("step"), "the step of"),
    (
        lambda content: as_deepspeed(content, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01),
        "max_grad_norm = 0.0 in a group of parameters, an option that AdamW does not have",
    ),
    (option("nesterov", True), "nesterov = True in a group"),
    (option("lr_mult", 0.5), "remove lr_mult from the groups if"),
    (option("param_names", ["lm_head.weight"]), r"names 1 of its \d+ parameters"),
    (lambda content: content["state"][3].update(EIGHT_BITS), "another optimizer"),
    (moment("exp_avg", torch.zeros(8, 16, dtype=torch.uint8)), "another optimizer"),
    (lambda content: without(content, "exp_avg_sq"), "only exp_avg of"),
    (as_sgd, "another optimizer"),
    (moment("exp_avg", torch.zeros(3, 3)), rf"exp_avg of {NAME} in .* has shape \[3, 3\]"),
    (lambda content: content["param_groups"][0]["params"].pop(), "in two groups, or in none"),
    (without_the_last, "holds 11 parameters"),
    (lambda content: content["state"].pop(4), "has no state of"),
    (lambda content: content["state"].clear(), "has taken no step"),
    (moment("exp_avg", torch.full((8, 16), torch.inf)), "NaN or infinity"),
    (moment("exp_avg_sq", torch.full((8, 16), -1.0)), "negative squares"),
    (lambda content: content.__setitem__("state", 7), "does not hold the state"),
    (lambda content: content.__setitem__("state", print), "cannot be loaded as"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "source", "llama", **LLAMA)


@pytest.fixture(scope="module")
def stepped(source: Path) -> Any:
    """The state of AdamW after a step."""
    model = load_strict(source)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    return optimizer.state_dict()


@pytest.mark.parametrize("number", range(len(ILLEGAL)))
def test_what_is_illegal_is_refused(
    number: int, source: Path, stepped: Any, tmp_path: Path
) -> None:
    """In a sentence, before anything is written; the control is every other test here."""
    spoil, said = ILLEGAL[number]
    content = deepcopy(stepped)
    spoil(content)
    torch.save(content, tmp_path / "state.pt")
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError, match=said):
        grown(source, tmp_path / "state.pt", tmp_path / "out")
    assert folder_bytes(tmp_path) == before


def test_a_disk_that_fills_up_with_the_state(source: Path, tmp_path: Path) -> None:
    """A limit for the size of files stands for the disk: torch hides its error behind others."""
    _, optimizer = trained(source, 1)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    grown(source, tmp_path / "optimizer.pt", tmp_path / "out")
    weights, state = (
        (tmp_path / "out" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in range(weights + 1, state, (state - weights) // 5):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(InputError, match=r"full cannot be written \(File too large"):
                grown(source, tmp_path / "optimizer.pt", tmp_path / "full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name for path in tmp_path.iterdir()} == {"optimizer.pt", "out"}


def with_schedules(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), maximize=True)
    lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
    SWALR(optimizer, 1e-2)
    step(model, optimizer, 0)
    option("capturable", True)(content := optimizer.state_dict())
    option("differentiable", True)(content)
    return content


def test_what_schedules_and_engines_add_is_carried_along(source: Path, tmp_path: Path) -> None:
    """Rates among it are scaled as rates are."""
    torch.save(content := with_schedules(load_strict(source)), tmp_path / "state.pt")
    grown(source, tmp_path / "state.pt", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["param_groups"]
    (before,) = content["param_groups"]
    for group in written:
        assert group.keys() == before.keys() | {"param_names"}
        for key, value in before.items():
            if key in ("initial_lr", "max_lr", "min_lr", "swa_lr"):
                assert group[key] / value == pytest.approx(group["lr"] / before["lr"])
            elif key not in ("params", "lr", "weight_decay", "eps"):
                assert group[key] == value
    assert len({group["lr"] for group in written}) > 1


OTHERS = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and name not in ("Optimizer", "Adam", "AdamW", "Muon", "LBFGS", "SparseAdam")
}


def test_no_other_optimizer_of_torch_is_taken(source: Path, tmp_path: Path) -> None:
    """And what keeps no moments is not taken for one that has not begun."""
    parameters = Parameters.of(Checkpoint(source))
    model = load_strict(source)
    for name, kind in OTHERS.items():
        optimizer = kind(model.parameters(), lr=1e-3)
        step(model, optimizer, 0)
        said = (
            "has no moments, such as SGD" if name == "SGD" else "another optimizer|AdamW and Muon"
        )
        for save in (save_torch, save_distributed) if name == "SGD" else (save_torch,):
            state = save(model, optimizer, tmp_path / f"{name}-{save.__name__}")
            with pytest.raises(InputError, match=said):
                open_state(state, parameters)
    state = save_torch(model, trained(source, 1)[1], tmp_path / "state")
    assert open_state(state, parameters).steps


def test_options_of_muon_are_its_own(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    optimizer = muon(model)
    state = save_torch(model, optimizer, tmp_path / "state")
    assert grown(source, state, tmp_path / "out").optimizer
    optimizer.param_groups[0]["rms_scale"] = 0.2
    state = save_torch(model, optimizer, tmp_path / "state")
    with pytest.raises(InputError, match=r"rms_scale = 0\.2 .* that Muon does not have"):
        grown(source, state, tmp_path / "other")


@pytest.mark.parametrize("numbered", [True, False])
def test_entries_of_other_forms(numbered: bool, source: Path, tmp_path: Path) -> None:
    """Parameters by number are refused; betas that are tensors, inside another state, are read."""
    model, optimizer = trained(source, 1)
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.25))
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    content = {"optimizer": optimizer.state_dict()} if numbered else {"app": {"optim": flat}}
    dcp.save(content, checkpoint_id=tmp_path / "state", no_dist=True)
    if numbered:
        with pytest.raises(InputError, match="save get_optimizer_state_dict"):
            grown(source, tmp_path / "state", tmp_path / "out")
    else:
        assert grown(source, tmp_path / "state", tmp_path / "out").optimizer


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HERE = "growkit_was_here"
"""An attribute that nothing has."""

Made = tuple[Path, Any, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model, and its optimizer after a step."""
    source = save_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    return source, *trained(source, 1)


def poisons(module: str, name: str) -> tuple[bytes, bytes]:
    """What sets an attribute of a class, or of whatever else has this name, and forgets it.

    Objects without slots have a dictionary for a state, others a pair with one.
    """
    named = f"c{module}\n{name}\n".encode()
    attribute = b"}X" + len(HERE).to_bytes(4, "little") + HERE.encode() + b"K\x01s"
    return named + attribute + b"b0", named + b"(N" + attribute + b"tb0"


def poison_file(file: Path, whole: bytes, poison: bytes) -> None:
    """Put this at the beginning of what is pickled, alone or in an archive of torch."""
    if file.name == ".metadata":
        file.write_bytes(whole[:2] + poison + whole[2:])
        return
    file.write_bytes(whole)
    with zipfile.ZipFile(file) as archive:
        records = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            pickled = name.endswith("data.pkl")
            archive.writestr(name, content[:2] + poison + content[2:] if pickled else content)


ROOMS = sorted((module, name) for module, names in CLASSES.items() for name in names)


GLOBALS = [
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.nn.parameter", "Parameter"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["list", "optimizer", "weights"])
def test_what_is_pickled_changes_nothing(kind: str, made: Made, tmp_path: Path) -> None:
    """Whatever it may name; without that it is read."""
    source, model, optimizer = made
    state = None
    if kind == "list":
        state = save_distributed(model, optimizer, tmp_path / "state")
        file = state / ".metadata"
        file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol=2))
    elif kind == "optimizer":
        file = state = save_torch(model, optimizer, tmp_path / "state")
    else:
        source = tmp_path / "source"
        source.mkdir()
        shutil.copy(made[0] / "config.json", source)
        file = source / "pytorch_model.bin"
        torch.save(model.state_dict(), file)
    whole = file.read_bytes()

    def read() -> Any:
        return open_state(state, Parameters.of(Checkpoint(source))) if state else Checkpoint(source)

    for module, name in ROOMS if kind == "list" else GLOBALS:
        try:
            thing = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # of another version of Python
            continue
        for poison in poisons(module, name):
            poison_file(file, whole, poison)
            with pytest.raises(InputError, match="cannot be"):
                read()
            assert not hasattr(thing, HERE)
    poison_file(file, whole, b"")
    assert read()
