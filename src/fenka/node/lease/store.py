"""What the node remembers of each Allocate, one file a token: which ids it was for, and whose it became.

Written before anybody acts on it, so that an agent killed at any moment goes on where it was.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from fenka.core.request import Slice
from fenka.isolation.files import ComputeShare, fsync_directory, write_atomically


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose a token became, and what it gives. Slices are of this container, `holds` of its whole pod.

    Defaults are not written: an older agent, after a rollback, understands all that does not use what is new.
    """

    uid: str
    namespace: str
    pod: str
    container: str
    slices: list[Slice]
    holds: list[Slice]
    environment: dict[str, str]
    library: str = ""
    """Directory of the shim that its programs have mapped."""
    limits_mib: dict[str, int] = {}
    """What it may hold of a card, by UUID, where that is not what its slice says: nothing limits it."""
    ceiling: int = 0
    """Percent of a card's time up to which it may use what is idle; 0: its share is hard."""
    resized: bool = False
    """Its slices are other than its pod's scheduler has written: `fenka.io/resized` says which."""

    @property
    def pod_name(self) -> str:
        """The pod's namespace and name."""
        return f"{self.namespace}/{self.pod}"

    @property
    def compute(self) -> ComputeShare:
        """What the percentages of its slices mean."""
        if self.limits_mib:
            return ComputeShare()
        above = any(0 < piece.compute < self.ceiling for piece in self.slices)
        return ComputeShare(0, "soft" if above else "hard")

    def limit_percent(self, piece: Slice) -> int:
        """Of the card's time, when nobody else wants it; 100 where nothing limits that."""
        if self.limits_mib or not piece.compute:
            return 100
        return max(piece.compute, self.ceiling)

    def limit_mib(self, piece: Slice) -> int:
        """What its programs may hold of the card of one of its slices."""
        return self.limits_mib.get(piece.uuid, piece.memory_mib)


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer to the kubelet. made_at: seconds since the epoch."""

    name: str
    resource: str
    ids: list[str]
    made_at: float
    lease: Lease | None = None
    version: int = 1


class LeaseStore:
    """All tokens of the node, in memory and on the disk."""

    def __init__(
        self,
        directory: Path,
        draw: Callable[[], str] = lambda: secrets.token_hex(16),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._draw, self._clock = directory, draw, clock
        self.tokens: dict[str, Token] = {}
        self.lock = asyncio.Lock()
        """Held while slices are given away, resized or taken back."""

    def load(self) -> list[str]:
        """Read what is on the disk; sentences about what could not be understood, which is put aside."""
        self._directory.mkdir(parents=True, exist_ok=True)
        complaints = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                token = msgspec.json.decode(path.read_bytes(), type=Token)
                self.tokens[token.name] = token
            except msgspec.MsgspecError as why:
                path.rename(path.with_suffix(".damaged"))
                complaints.append(f"{path} is not understood and was put aside: {why}")
        return complaints

    def issue(self, resource: str, ids: Iterable[str], name: str = "") -> Token:
        """A new token for these ids, safe on the disk. name: of one that the kubelet still knows."""
        token = Token(name or self._draw(), resource, sorted(ids), self._clock())
        self.put(token)
        return token

    def put(self, token: Token) -> None:
        """Remember it as it is now."""
        write_atomically(self._directory / f"{token.name}.json", msgspec.json.encode(token))
        fsync_directory(self._directory)
        self.tokens[token.name] = token

    def drop(self, name: str) -> None:
        """Forget it."""
        (self._directory / f"{name}.json").unlink(missing_ok=True)
        self.tokens.pop(name, None)
