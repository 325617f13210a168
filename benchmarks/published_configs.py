"""Do grown models compute what their sources compute, where another transformers loads both?

The configs in ``tests/published.jsonl`` have the keys that their publishers write, with small
sizes. First, growkit grows a random model of each; then any version of transformers compares the
folders, without growkit:

    python benchmarks/published_configs.py make FOLDER [NAME…]
    OTHER-PYTHON benchmarks/published_configs.py compare FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS = Path(__file__).parent.parent / "tests" / "published.jsonl"

GROWTHS: dict[str, dict[str, Any]] = {
    "width": {"hidden": "x2"},
    "depth": {"method": "depth", "layers": "x2"},
    "experts": {"method": "experts", "experts": "x2"},
}

TOKENS = 96
"""Length of the compared text: longer than the windows of these configs."""


def save(folder: Path, config: dict[str, Any]) -> None:
    """Save a random model with this very config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    read = AutoConfig.from_pretrained(folder)
    known: Any = transformers.AutoModelForImageTextToText
    auto: Any = known if type(read) in known._model_mapping else AutoModelForCausalLM
    model = auto.from_config(read, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def make(folder: Path, names: list[str]) -> None:
    """Save and grow the models."""
    import growkit
    from growkit.base.errors import InputError
    from growkit.sources import family_for, find

    for line in CONFIGS.read_text().splitlines():
        name, config = json.loads(line)["name"], json.loads(line)["config"]
        place = folder / name.replace("/", "--")
        if (names and name not in names) or place.exists():
            continue
        save(place / "source", config)
        try:
            inferred = family_for(find(place / "source"), None)
        except InputError as error:
            (place / "refused").write_text(str(error))
            print(name, error, flush=True)
            continue
        family = inferred.description if inferred else None
        for growth, options in GROWTHS.items():
            try:
                growkit.grow(
                    place / "source", place / growth, family=family, verify=False, **options
                )
                print(name, growth, "made", flush=True)
            except InputError as error:
                print(name, growth, error, flush=True)


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of fixed tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.arange(TOKENS)[None] * 7 % 100 + 3
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def compare(folder: Path) -> None:
    """Print the largest difference of every grown model, in standard deviations."""
    transformers.utils.logging.set_verbosity_error()
    print(f"| transformers {transformers.__version__} | {' | '.join(GROWTHS)} |")
    print("| --- |" + " --- |" * len(GROWTHS))
    for place in sorted(each for each in folder.iterdir() if (each / "source").is_dir()):
        for dtype in (torch.float64, torch.float32):  # routers of some classes know no float64
            cells = dict.fromkeys(GROWTHS, "–")
            try:
                source = logits(place / "source", dtype)
                for growth in GROWTHS:
                    if (place / growth).is_dir():
                        error = (logits(place / growth, dtype) - source).abs().max()
                        cells[growth] = f"{float(error / source.std()):.1g}"
                break
            except Exception as error:
                cells = dict.fromkeys(GROWTHS, str(error)[:60].replace("\n", " "))
        print(f"| {place.name.replace('--', '/')} | {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), sys.argv[3:])
    else:
        compare(Path(sys.argv[2]))
