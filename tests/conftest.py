"""Options, samples and fixtures; what imports torch is imported where a worker needs it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.models", "tests.files", "tests.commands")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, not samples")
    parser.addoption("--inputs", type=int, help="how many odd files tests/fuzz makes")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Keep n cases of a test marked ``sampled(n, *ids)``, these and others chosen by its name.

    Before there are tests of them: most of the time that collecting takes is theirs.
    """
    yield
    mark, cases = metafunc.definition.get_closest_marker("sampled"), metafunc._calls
    if mark and cases and not metafunc.config.getoption("--all"):
        count, *ids = mark.args
        chosen = [case.id for case in cases if case.id in ids]
        rest = [case.id for case in cases if case.id not in chosen]
        few = min(max(count, 1) - len(chosen), len(rest))
        chosen += random.Random(metafunc.definition.nodeid).sample(rest, few)
        cases[:] = [case for case in cases if case.id in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``sampled(0)``."""
    marks = [] if config.getoption("--all") else [i.get_closest_marker("sampled") for i in items]
    left_out = [item for item, mark in zip(items, marks, strict=False) if mark and not mark.args[0]]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tensors of more elements than this are large: they are read and cast in parts."""
    from growkit.base import tensors
    from growkit.engine import lending

    elements = 128
    for module in (tensors, lending):
        monkeypatch.setattr(module, "AT_ONCE", elements)
    return elements


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is read of checkpoints: names of tensors, with the number of elements."""
    from growkit.model.checkpoint.reading import Checkpoint

    found: list[tuple[str, int]] = []
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, *part: slice | None) -> Any:
        tensor = read(self, name, *part)
        found.append((name, tensor.numel()))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", noted)
    return found


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """``make("llama", hidden_size=32)`` -> the folder of a tiny random model."""
    from tests.models import save_model

    count = iter(range(10**6))

    def build(kind: str, **options: Any) -> Path:
        return save_model(tmp_path / f"{kind}-{next(count)}", kind, **options)

    return build


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, what it grew into, and what it was converted into with a loss."""
    import growkit
    from tests.models import save_model

    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8)
    growkit.grow(source, folder / "exact", hidden="x2", verify=False)
    growkit.convert(source, folder / "lossy", "shared-diff", rank=1, verify=False)
    return folder


@pytest.fixture(autouse=True)
def quick_proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models are saved and generate in the tests marked ``usage`` only: it takes a while.

    So do gradients, unless a proof is asked for them.
    """
    from growkit.proof import mode_results, verdict

    if "usage" in request.keywords:
        return
    every = verdict.checks

    def checks() -> dict[str, Any]:
        found = dict(every())
        learning = found["trainability"]

        def run(pair: Any, function: Any) -> Any:
            return learning.run(pair, function) if pair.settings.trainability else None

        return found | {"trainability": replace(learning, run=run)}

    monkeypatch.setattr(verdict, "checks", checks)
    monkeypatch.setattr(mode_results, "run_whole_models", lambda *args: iter(()))
