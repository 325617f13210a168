"""What the class of a model resolves its config to, with the defaults of all keys left out."""

from __future__ import annotations

from growkit.base.errors import InputError, foreign
from growkit.checkpoint.tensors import Config
from growkit.engine.oracle import lacks_class, parsed, quiet
from growkit.families.family import family_of
from growkit.modeling import register
from growkit.planning.layouts import as_diff_transformer

OLDER_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Keys that transformers reads into ``rope_parameters``, if that key is not there."""

PROVENANCE_KEYS = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "auto_map"),
        *("_attn_implementation", "_attn_implementation_autoset", "transformers_weights"),
        "architectures",
    }
)
"""Keys that say how a file came about, or that are compared elsewhere."""


def resolved(config: Config) -> Config | None:
    """A config with the defaults of its class; None where transformers knows none, or refuses it.

    Null is a value: a window of null is none, and one that is left out has the default length.
    """
    register()
    try:
        with quiet(), foreign("the config is not understood", "correct it"):
            complete: Config = parsed(config).to_dict()
    except InputError:
        return None
    return complete


def resolved_as_loaded(config: Config, where: str) -> Config | None:
    """Like ``resolved``; a layout without a class in transformers runs as a DIFF Transformer."""
    return resolved(as_diff_transformer(config, where) if lacks_class(config) else config)


def write_defaults_out(source: Config, planned: Config, where: str) -> Config:
    """The planned config of another class, with what the source's class assumes written out.

    A key that the source's config leaves out has the default of the source's class. The target's
    class may have another default for it.

    Args:
        source: the config of the source, as its file has it.
        planned: the config of what is made of it.
        where: the source, for messages.
    """
    if source.get("model_type") == planned.get("model_type"):
        return planned
    was, now = (resolved_as_loaded(each, where) for each in (source, planned))
    if was is None or now is None:
        return planned
    sizes = family_of(source, where).size_keys | family_of(planned, where).size_keys
    missing = {
        key: was[key]
        for key in (was.keys() & now.keys()) - source.keys() - sizes - PROVENANCE_KEYS - {"dtype"}
        if was[key] != now[key]
    }
    dropped = OLDER_ROPE_KEYS if "rope_parameters" in missing else ()
    return {key: value for key, value in planned.items() if key not in dropped} | missing
