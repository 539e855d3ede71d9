"""Stores tokens, one file each: the device IDs of an Allocate, and the lease that it became.

Tokens are written before they are used, so that a program killed at any moment continues where it was.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.request import ComputeMode, Slice, reserved_percent
from fenka.isolation.lease_files import ComputeShare, decode_json, fsync_directory, write_atomically
from fenka.isolation.limit_changes import Sizes
from fenka.node.instance_device import InstanceDevice


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The container that holds a token, and its slices. `holds` are the slices of its whole pod.

    Defaults are not written, so that an older program, after a rollback, reads what does not use new fields.
    """

    uid: str
    namespace: str
    pod: str
    container: str
    slices: list[Slice]
    holds: list[Slice]
    environment: dict[str, str]
    library: str = ""
    """Directory of the shim that its programs map."""
    limits_mib: dict[str, int] = {}
    """Its part of each card, by UUID, on a node that does not isolate; otherwise empty."""
    burst_percent: int = msgspec.field(name="ceiling", default=0)
    """Percent of a card's time up to which it may use idle time; 0 if its share is a hard limit."""
    resized: bool = False
    """Whether its slices differ from its pod's record, as `fenka.io/resized` shows."""
    weighted: bool = False
    """Whether the compute of its slices is a weight. `holds` never has weights."""
    instances: dict[str, InstanceDevice] = {}
    """The MIG instances that exist for its slices, by place. Slices name an instance by its place."""
    unlimited_drivers: bool = False
    """Whether its container gets the driver's parts that the shim cannot limit, such as OpenCL."""

    @property
    def pod_name(self) -> str:
        """The pod's namespace and name."""
        return f"{self.namespace}/{self.pod}"

    @property
    def devices(self) -> list[str]:
        """UUIDs of its slices' devices, as the driver knows them."""
        return [self.device(piece) for piece in self.slices]

    def device(self, piece: Slice) -> str:
        """Return the UUID of a slice's card or instance, as the driver knows it."""
        instance = self.instances.get(piece.uuid)
        return instance.uuid if instance else piece.uuid

    def device_compute(self, piece: Slice) -> int:
        """Return the compute of a slice's card or instance, in percent of the whole card."""
        instance = self.instances.get(piece.uuid)
        return instance.compute if instance else WHOLE_COMPUTE

    @property
    def compute(self) -> ComputeShare:
        """How the percentages of its slices are enforced."""
        if self.limits_mib:
            return ComputeShare()
        return ComputeShare(0, self._mode)

    @property
    def _mode(self) -> ComputeMode:
        if self.weighted:
            return "weight"
        above = any(0 < piece.compute < self.burst_percent for piece in self.slices)
        return "soft" if above else "hard"

    def reserved(self, slices: Iterable[Slice]) -> list[Slice]:
        """Return what is reserved for the lease while it has these slices."""
        return [
            replace(piece, compute=reserved_percent(piece.compute, self._mode)) for piece in slices
        ]

    def limit_percent(self, piece: Slice) -> int:
        """Return the most of a card's time that it may use on an idle card; 100 if unlimited."""
        if self.limits_mib or self.weighted or not piece.compute:
            return 100
        return max(piece.compute, self.burst_percent)

    def limit_mib(self, piece: Slice) -> int:
        """Return what its programs may hold of the card of a slice."""
        return self.limits_mib.get(piece.uuid, piece.memory_mib)


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer to Allocate. made_at: seconds since the epoch."""

    name: str
    resource: str
    ids: list[str]
    made_at: float
    lease: Lease | None = None
    version: int = 1


_tokens = msgspec.json.Decoder(Token)


class LeaseStore:
    """All tokens of the node, in memory and on disk."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self.tokens: Mapping[str, Token] = {}
        """Replaced by each change and never changed itself: threads store tokens while others read them."""
        self._changing = threading.RLock()
        self.lock = asyncio.Lock()
        """Held while slices are given away, resized or taken back."""

    @property
    def leases(self) -> dict[str, Lease]:
        """The leases by the names of their tokens."""
        return {token.name: token.lease for token in self.tokens.values() if token.lease}

    def load(self) -> list[str]:
        """Read the files of tokens that are not known, and return a sentence about each that was invalid.

        Those are renamed. The relay writes tokens, too, while this program is away.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        complaints = []
        with self._changing:
            loaded = {}
            for path in sorted(self._directory.glob("*.json")):
                if path.stem in self.tokens:
                    continue
                try:
                    token = decode_json(_tokens, path.read_bytes())
                    loaded[token.name] = token
                except msgspec.DecodeError as error:
                    damaged = path.rename(path.with_suffix(".damaged"))
                    complaints.append(
                        f"{path} is invalid and was renamed to {damaged.name}: {error}"
                    )
            self.tokens = {**loaded, **self.tokens}
        return complaints

    def issue(self, resource: str, ids: Iterable[str], name: str = "") -> Token:
        """Store a new token for these IDs, and return it.

        name: of a lost token that the kubelet still has. Another thread, or the relay, may have stored it
        meanwhile: then it is returned.
        """
        with self._changing:
            if name:
                self.load()
            token = self.tokens.get(name)
            if token is None:
                token = Token(name or secrets.token_hex(16), resource, sorted(ids), self._clock())
                self.put(token)
            return token

    def put(self, token: Token) -> None:
        """Store a token."""
        with self._changing:
            write_atomically(self._directory / f"{token.name}.json", msgspec.json.encode(token))
            fsync_directory(self._directory)
            self.tokens = {**self.tokens, token.name: token}

    def resize(self, sizes: Sizes, holds: Sequence[Slice]) -> None:
        """Store the slices of tokens, and what their pod holds. Raises OSError."""
        for name, slices in sizes.items():
            token = self.tokens.get(name)
            if token is None or token.lease is None:
                continue
            lease = msgspec.structs.replace(
                token.lease,
                slices=list(slices),
                holds=list(holds),
                resized=token.lease.resized or list(slices) != token.lease.slices,
            )
            if lease != token.lease:
                self.put(msgspec.structs.replace(token, lease=lease))

    def drop(self, name: str) -> None:
        """Remove a token."""
        with self._changing:
            (self._directory / f"{name}.json").unlink(missing_ok=True)
            self.tokens = {key: token for key, token in self.tokens.items() if key != name}
