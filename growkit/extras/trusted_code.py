"""Code of a model folder that the user trusts.

Its classes are registered with transformers, as if a package had done so. Everything else then
treats the model as one of transformers.
"""

from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, foreign
from growkit.model.checkpoint.folder import Folder
from growkit.proof.files import TRUSTED, own_code

CLASSES = ("AutoConfig", "AutoModelForCausalLM")
"""The classes that ``auto_map`` in a config must name."""


def trust(folder: Path) -> None:
    """Run the code of a model folder, and register its config and model with transformers.

    Raises:
        InputError: the config names no classes in files of the folder, or they do not work.
    """
    opened = Folder(folder)
    opened.check_files()
    named = opened.json("config.json").get("auto_map")
    classes = [str((named or {}).get(key)) for key in CLASSES] if isinstance(named, dict) else []
    files = own_code(opened)
    for reference in classes or ["None"]:
        module, _, name = reference.partition(".")
        if f"{module}.py" not in files or not name.isidentifier():
            raise InputError(
                f"auto_map in config.json of {folder} names no {' and '.join(CLASSES)} in files of "
                "that folder, so it has no code to trust; leave the option out"
            )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config: Any
    model: Any
    with foreign(f"the code in {folder} does not work", "correct it"):
        config, model = (
            get_class_from_dynamic_module(name, opened.path, local_files_only=True)
            for name in classes
        )
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
    TRUSTED[model.__name__] = files
