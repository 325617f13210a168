"""Models on object stores and web servers, of which headers and parts of tensors are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from growkit.checkpoint.elsewhere import address_in
from growkit.checkpoint.remote import RemoteWeights, is_remote
from growkit.checkpoint.tensors import Weights
from growkit.sources.source import Source, kinds


@dataclass(frozen=True)
class Stored(Source):
    """A model on a store."""

    def weights(self) -> RemoteWeights:
        """See ``Source``; parts of tensors are read where they lie."""
        return RemoteWeights(self.name)

    def headers(self) -> Weights:
        """See ``Source``."""
        return self.weights()


class Store:
    """Addresses that are of no other kind, such as ``s3://BUCKET/MODEL``."""

    folders = False

    def knows(self, given: str) -> bool:
        """See ``Kind``."""
        others = (kind for kind in kinds() if kind is not self)
        return is_remote(given) and not any(kind.knows(given) for kind in others)

    def find(self, given: str, *, weights: bool) -> Source:
        """See ``Kind``."""
        return Stored(address_in(given.rstrip("/")), Path(given))


KIND = Store()
