"""What a fake of Alibaba Cloud has and remembers: its landscape, which tests write, and its state."""

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from fenka.cloud.simulated_cloud import CloudState, SimulatedOffer
from fenka.core.nodes.case import Capacity

T = TypeVar("T")
FaultKind = Literal["lose-call", "lose-answer", "hold", "throttle", "error"]


class ScalingGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scaling group with its only configuration.

    Attributes:
        zones: in the order in which they are tried, and within a zone the types.
        cap: the price limit of a spot group, None for any price.
        tags: of the instances.
        activity_s: how long its activities take.
        expected: whether it keeps an expected number of instances.
        policy: how it says to choose; the fake always tries in the order of `zones`.
        remedy: whether it replaces spot instances by itself.
        rebalance: whether it moves instances between zones by itself.
        patterns: whether its configuration has a pattern of types too.
    """

    id: str
    types: tuple[str, ...]
    zones: tuple[str, ...]
    capacity: Capacity = "on-demand"
    cap: float | None = None
    min: int = 0
    max: int = 1000
    tags: dict[str, str] = {}
    activity_s: float = 0.0
    expected: bool = False
    policy: str = "PRIORITY"
    remedy: bool = False
    rebalance: bool = False
    patterns: bool = False


class InstanceType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the cloud says of a type. gpu_gib: memory of one card, 0 if it is not stated."""

    cpus: int
    memory_gib: float
    gpus: int = 0
    gpu: str = ""
    gpu_gib: float = 0


class Landscape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be had. Times of `offers` are seconds since the cloud's first call; their groups are empty.

    Attributes:
        secrets: by the IDs of access keys.
        templates: launch templates with the tags that they give.
        vswitches: with their zones.
        quota: instances of the account, None for any number.
        page: the largest page of a listing.
    """

    region: str
    secrets: dict[str, str]
    offers: tuple[SimulatedOffer, ...]
    groups: tuple[ScalingGroup, ...] = ()
    templates: dict[str, dict[str, str]] = {}
    vswitches: dict[str, str] = {}
    types: dict[str, InstanceType] = {}
    quota: int | None = None
    page: int = 100


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next call of an action fails.

    `lose-call` closes the connection before anything is done, `lose-answer` after it. `hold` delays the
    answer.
    """

    action: str
    kind: FaultKind
    seconds: float = 0.0


class Details(msgspec.Struct):
    """What the market does not know of an instance."""

    tags: dict[str, str]
    group: str = ""
    activity: str = ""


class Activity(msgspec.Struct):
    """A scaling activity. launch: how many are wanted. remove: which end."""

    id: str
    group: str
    starts_at: float
    ends_at: float
    metadata: str = ""
    launch: int = 0
    remove: list[str] = []
    status: Literal["InProgress", "Successful", "Warning", "Failed", "Rejected"] = "InProgress"
    created: list[str] = []
    error: str = ""


class Spent(msgspec.Struct):
    """What a ClientToken was used for, and the answer."""

    parameters: str
    status: int
    answer: dict[str, Any]


class State(msgspec.Struct):
    """All that a fake remembers. nonces are not kept, since a signature's date bounds them."""

    cloud: CloudState
    details: dict[str, Details] = {}
    activities: dict[str, Activity] = {}
    tokens: dict[str, Spent] = {}
    calls: list[str] = []


class Folder:
    """The files of a fake: tests write landscape, faults and clock at any time, and each call reads them."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def landscape(self) -> Landscape:
        """Return what can be had now."""
        return msgspec.json.decode((self.path / "landscape.json").read_bytes(), type=Landscape)

    def change(self, landscape: Landscape) -> None:
        """Set what can be had."""
        self._write("landscape.json", msgspec.json.encode(landscape))

    def now(self, real: float) -> float:
        """Return the time: `clock` has a time to stand at, or seconds to add to the real one as `+3600`."""
        try:
            text = (self.path / "clock").read_text().strip()
        except FileNotFoundError:
            return real
        return real + float(text[1:]) if text.startswith("+") else float(text)

    def set_clock(self, text: str) -> None:
        """Set the time, in the format of `now`."""
        self._write("clock", text.encode())

    def add_fault(self, fault: Fault) -> None:
        """Let the next call of an action fail, besides what is to fail already."""
        self._write("faults.json", msgspec.json.encode([*self._faults(), fault]))

    def clear_faults(self) -> None:
        """Let nothing fail any more."""
        self._write("faults.json", b"[]")

    def take_fault(self, action: str) -> Fault | None:
        """Return and remove the first fault of an action."""
        faults = self._faults()
        for number, fault in enumerate(faults):
            if fault.action == action:
                self._write(
                    "faults.json", msgspec.json.encode(faults[:number] + faults[number + 1 :])
                )
                return fault
        return None

    def state(self, now: float) -> State:
        """Return the state, a new one if there is none."""
        return self._read("state.json", State, State(CloudState(began_at=now)))

    def keep(self, state: State) -> None:
        """Store the state."""
        self._write("state.json", msgspec.json.encode(state))

    def _faults(self) -> list[Fault]:
        return self._read("faults.json", list[Fault], [])

    def _read(self, name: str, kind: type[T], default: T) -> T:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except FileNotFoundError:
            return default

    def _write(self, name: str, data: bytes) -> None:
        fresh = self.path / f"{name}.new"
        fresh.write_bytes(data)
        fresh.replace(self.path / name)


def fingerprint(action: str, parameters: dict[str, Any]) -> str:
    """Return what makes two calls with one token the same."""
    return f"{action} {json.dumps(parameters, sort_keys=True)}"
