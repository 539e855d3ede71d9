"""What nodes were, and offers that did not help: ConfigMap fenka-shapes."""

import hashlib
from collections.abc import Mapping

import msgspec

from fenka.autoscaler.config_maps import StoredMap
from fenka.autoscaler.shapes import Shape
from fenka.cloud.config import Config
from fenka.cloud.port import OfferKey
from fenka.cluster.autoscaling import SHAPES_MAP
from fenka.kubernetes.client import Api

MISFITS_KEY = "misfits"


class _Misfit(msgspec.Struct, frozen=True):
    offer: OfferKey
    classes: tuple[str, ...]


class _Misfits(msgspec.Struct, frozen=True):
    """Misfits under a configuration. They are forgotten when it changes."""

    configuration: str
    misfits: tuple[_Misfit, ...]


class ShapeStore:
    """Attributes: shapes: by instance type. misfits: classes of pods by the offer that does not help them."""

    def __init__(self, api: Api, namespace: str, config: Config) -> None:
        self._map = StoredMap(api, namespace, SHAPES_MAP)
        self._configuration = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
        self.shapes: Mapping[str, Shape] = {}
        self.misfits: Mapping[OfferKey, frozenset[str]] = {}

    async def load(self) -> None:
        """Read both. What is not understood is learnt again. Raises ApiError, ApiUnreachable."""
        await self._map.load()
        shapes = dict[str, Shape]()
        self.misfits = {}
        for key, text in self._map.data.items():
            try:
                if key != MISFITS_KEY:
                    shapes[key] = msgspec.json.decode(text, type=Shape)
                    continue
                known = msgspec.json.decode(text, type=_Misfits)
            except msgspec.MsgspecError:
                continue
            if known.configuration == self._configuration:
                self.misfits = {each.offer: frozenset(each.classes) for each in known.misfits}
        self.shapes = shapes

    async def save(
        self, shapes: Mapping[str, Shape], misfits: Mapping[OfferKey, frozenset[str]]
    ) -> None:
        """Add what was learnt. Raises WriteLost, ApiError, ApiUnreachable."""
        if not shapes and not misfits:
            return
        merged = dict(self.misfits)
        for offer, classes in misfits.items():
            merged[offer] = merged.get(offer, frozenset()) | classes
        changes: dict[str, str | None] = {
            kind: msgspec.json.encode(shape).decode() for kind, shape in shapes.items()
        }
        if misfits:
            entries = tuple(
                _Misfit(offer, tuple(sorted(classes))) for offer, classes in merged.items()
            )
            encoded = msgspec.json.encode(_Misfits(self._configuration, entries))
            changes[MISFITS_KEY] = encoded.decode()
        await self._map.write(changes)
        self.shapes = {**self.shapes, **shapes}
        self.misfits = merged
