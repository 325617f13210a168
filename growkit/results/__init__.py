"""Results: JSON mappings with typed fields."""

import platform
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from typing_extensions import dataclass_transform

from growkit.base import __version__


def versions() -> dict[str, str]:
    """Versions of the software on which figures and files depend."""
    packages = ("torch", "transformers", "safetensors")
    own = {"python": platform.python_version(), "growkit": __version__}
    return own | {name: _version(name) for name in packages}


@cache
def _version(package: str) -> str:
    from importlib.metadata import version  # takes 10 ms

    return version(package)


@dataclass_transform(kw_only_default=True)
class Result(dict[str, Any]):
    """A result with the fields that its class declares.

    ``result.kept`` and ``result["kept"]`` are the same. A result is a dict, so it can be compared,
    copied and written as JSON. A field with the default None may be left out; values without a
    field are ignored.
    """

    if not TYPE_CHECKING:  # which knows the fields from their declarations

        def __init_subclass__(cls) -> None:
            own = {name for name in cls.__annotations__ if name in vars(cls)}
            cls._optional = getattr(cls, "_optional", set()) | own
            for name in own:
                delattr(cls, name)  # it would hide the value

        def __init__(self, **values: Any) -> None:
            names = (n for n in fields(type(self)) if n in values or n in self._optional)
            super().__init__({name: values.get(name) for name in names})

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in fields(type(self)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self})


@cache
def fields(kind: type[Result]) -> dict[str, Any]:
    """The fields that a class of results and its bases declare, with their types."""
    return get_type_hints(kind)
