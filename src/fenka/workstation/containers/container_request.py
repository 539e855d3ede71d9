"""Reads what a container requests: its device of fenka's, its environment and its annotations. Pure.

The OCI state and the bundle's config.json are the container's own, so they are read as hostile: bounded, and
no path in them is opened. The environment may be the image's. Annotations are the user's, except with Podman,
which gives a container those of its image.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.request import COMPUTE_MODES
from fenka.formats.documents import similar
from fenka.formats.durations import parse_duration
from fenka.isolation.lease_files import decode_json
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.workstation.containers.hook_receiver import MAX_CONFIG_BYTES, MAX_STATE_BYTES

MAX_KEEP_S = 600.0
"""A slice is kept for a restart no longer than this."""

HOOK = "fenka-hook"

Engine = Literal["docker", "podman", "nerdctl", ""]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_MAX_VALUE = 256
_PREFIX, _ANNOTATION = "FENKA_", "fenka.io/"
_PARAMETERS = (
    *("GPU_MEM", "GPU_CORE", "GPU_CORE_MODE", "CARDS", "TIME_LIMIT", "NAME", "TEAM"),
    *("WAIT", "KEEP", "EVICTION_GRACE", "TICKET"),
)
_ONLY_ANNOTATIONS = ("PRIORITY", "USER")
"""An image's environment must not set them, so they are ignored there."""


class InvalidContainer(FenkaError):
    """The container gets no slice. The message says why."""


class OciState(msgspec.Struct, frozen=True):
    """The part of the OCI state that fenka reads."""

    id: str
    bundle: str = ""
    annotations: Mapping[str, str] = {}


class _OciProcess(msgspec.Struct, frozen=True):
    args: list[str] = []
    env: list[str] = []


class _OciHook(msgspec.Struct, frozen=True):
    path: str = ""
    args: list[str] = []


class _Hooks(msgspec.Struct, frozen=True):
    created: list[_OciHook] = msgspec.field(default=[], name="createRuntime")


class OciConfig(msgspec.Struct, frozen=True):
    """The part of a bundle's config.json that fenka reads."""

    process: _OciProcess = _OciProcess()
    annotations: Mapping[str, str] = {}
    hooks: _Hooks = _Hooks()


_states, _configs = msgspec.json.Decoder(OciState), msgspec.json.Decoder(OciConfig)


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The request of a container for cards.

    Attributes:
        id: The engine's id of the container.
        engine: The command that manages it; empty if that is not known.
        spec: Its job.
        waits: Whether it waits for what is not free.
        keep_s: Seconds for which its slice is kept for its next start.
        user: The user that its annotation names.
        ticket: The ticket that says who pays.
    """

    id: str
    engine: Engine
    spec: JobSpec
    waits: bool = True
    keep_s: float = 0.0
    user: str = ""
    ticket: str = field(default="", repr=False)


def read_request(device: str, state: bytes, config: bytes) -> DeviceRequest:
    """Return what a container requests. Raises InvalidContainer.

    Args:
        device: The hook's argument: slice=4, slice=6GiB, slice=any or card=1.
        state: The OCI state.
        config: The bundle's config.json.
    """
    described = _decode(_states, state, MAX_STATE_BYTES, "state")
    bundle = _decode(_configs, config, MAX_CONFIG_BYTES, "config.json")
    if not _ID.fullmatch(described.id):
        raise InvalidContainer(f"{_shown(described.id)} is no container's id that fenka takes")
    devices = sum(hook.path.rpartition("/")[2] == HOOK for hook in bundle.hooks.created)
    if devices > 1:
        raise InvalidContainer(
            "this container has several devices of fenka: name one, and say how many cards with FENKA_CARDS"
        )
    annotations = {**bundle.annotations, **described.annotations}
    environment = _environment(bundle.process.env)
    values = _values(environment, annotations)
    name = values.get("NAME") or f"c-{described.id[:12]}"
    return DeviceRequest(
        described.id,
        _engine(described, annotations),
        JobSpec(
            bundle.process.args,
            _resources(device, values, environment.get("NVIDIA_GPU_MEMORY_LIMIT", "")),
            name,
            "container",
            priority=_whole("fenka.io/priority", values.get("PRIORITY", "0")),
            time_limit_s=_seconds_if_given(values, "TIME_LIMIT"),
            eviction_grace_s=_seconds_if_given(values, "EVICTION_GRACE"),
            team=values.get("TEAM", ""),
        ),
        _waits(values.get("WAIT", "hold")),
        _keep_s(values.get("KEEP", "0s")),
        values.get("USER", ""),
        values.get("TICKET", ""),
    )


def _decode(decoder: msgspec.json.Decoder[Any], content: bytes, most: int, name: str) -> Any:
    if len(content) > most:
        raise InvalidContainer(f"the container's {name} has more than {most >> 20} MiB")
    try:
        return decode_json(decoder, content)
    except msgspec.MsgspecError as why:
        raise InvalidContainer(f"the container's {name} is not understood: {why}") from None


def _environment(variables: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in variables)}


def _values(environment: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters without their prefix. Annotations come first. Raises InvalidContainer."""
    values = dict[str, str]()
    for name, key, value in _given(environment, annotations):
        known = (*_PARAMETERS, *(_ONLY_ANNOTATIONS if name.startswith(_ANNOTATION) else ()))
        if key not in known:
            # The prefix, which all have, would make any name similar.
            hint = similar(key, known).replace("did you mean ", f"did you mean {_PREFIX}")
            raise InvalidContainer(
                f"there is no parameter {_shown(name)}{hint or ': leave it out'}"
            )
        if len(value) > _MAX_VALUE:
            raise InvalidContainer(f"{name} has more than {_MAX_VALUE} characters")
        if value:
            values[key] = value
    return values


def _given(
    environment: Mapping[str, str], annotations: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    for name, value in environment.items():
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _ONLY_ANNOTATIONS:
            yield name, name.removeprefix(_PREFIX), value
    for name, value in annotations.items():
        if name.startswith(_ANNOTATION):
            yield name, name.removeprefix(_ANNOTATION).upper().replace("-", "_"), value


def _resources(device: str, values: Mapping[str, str], limit_mib: str) -> GpuResources:
    kind, _, amount = device.partition("=")
    core = _whole("FENKA_GPU_CORE", values.get("GPU_CORE", "0").removesuffix("%"))
    mode = values.get("GPU_CORE_MODE", "hard")
    if mode not in COMPUTE_MODES:
        raise InvalidContainer(
            f"FENKA_GPU_CORE_MODE={_shown(mode)} is not one of {', '.join(COMPUTE_MODES)}"
        )
    memory = values.get("GPU_MEM", "")
    if kind == "card":
        if memory or core or "CARDS" in values:
            raise InvalidContainer(
                f"fenka.io/card={amount} takes whole cards: leave out FENKA_GPU_MEM, FENKA_GPU_CORE and "
                "FENKA_CARDS"
            )
        return GpuResources(cards=_whole("fenka.io/card", amount), whole=True)
    if kind != "slice":
        raise InvalidContainer(
            f"{_shown(device)} is no device of this fenka: write its file again with "
            "`fenka containers on`"
        )
    if amount != "any" and memory not in ("", amount):
        raise InvalidContainer(
            f"FENKA_GPU_MEM={_shown(memory)} is another size than fenka.io/slice={amount}: use "
            "fenka.io/slice=any with it"
        )
    if amount == "any" and not memory and limit_mib:
        memory = f"{_whole('NVIDIA_GPU_MEMORY_LIMIT', limit_mib)}MiB"
    if amount == "any" and not memory:
        raise InvalidContainer(
            "fenka.io/slice=any needs a size: set FENKA_GPU_MEM=4 or FENKA_GPU_MEM=6GiB"
        )
    cards = _whole("FENKA_CARDS", values.get("CARDS", "1"))
    if not 0 <= core <= 100 or cards < 1:
        raise InvalidContainer(
            "FENKA_GPU_CORE is from 1 to 100 percent, and FENKA_CARDS at least 1"
        )
    return GpuResources(memory if amount == "any" else amount, core, mode, cards)


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,7}", text):
        raise InvalidContainer(f"{name}={_shown(text)} is no whole number")
    return int(text)


def _seconds_if_given(values: Mapping[str, str], name: str) -> float | None:
    return _seconds(f"{_PREFIX}{name}", values[name]) if name in values else None


def _seconds(name: str, text: str) -> float:
    seconds = parse_duration(text)
    if seconds is None:
        raise InvalidContainer(f"{name}={_shown(text)} is no time: write it as 90s, 10m or 2h30m")
    return seconds


def _keep_s(text: str) -> float:
    seconds = 0.0 if text == "0" else _seconds("FENKA_KEEP", text)
    if seconds > MAX_KEEP_S:
        raise InvalidContainer(f"FENKA_KEEP={text} is too long: at most {MAX_KEEP_S / 60:.0f}m")
    return seconds


def _waits(text: str) -> bool:
    if text not in ("hold", "refuse"):
        raise InvalidContainer(f"FENKA_WAIT={_shown(text)} is neither hold nor refuse")
    return text == "hold"


def _engine(state: OciState, annotations: Mapping[str, str]) -> Engine:
    if annotations.get("io.container.manager") == "libpod":
        return "podman"
    if any(name.startswith("nerdctl/") for name in annotations):
        return "nerdctl"
    return "docker" if "/moby/" in state.bundle else ""


def _shown(text: str) -> str:
    return repr(text[:80])
