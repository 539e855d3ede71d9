"""Checks at the start whether this node can share its cards. Each finding is one sentence."""

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card
from fenka.core.units import card_units
from fenka.node.kubelet import client
from fenka.procfs import mounts

_LOG = logging.getLogger(__name__)

_CONTAINERD = Path("etc/containerd/config.toml")
_CRIO = Path("etc/crio")
_NVIDIA = Path("etc/nvidia-container-runtime/config.toml")
_ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"


_RUNTIME = re.compile(r"([\w-]+)://v?(\d+)\.(\d+)")


class PreflightError(FenkaError):
    """This node cannot share cards as it is. The message says why and what to do."""

    exit_code = INVALID_INPUT


def check_unit(cards: Sequence[Card], unit_mib: int) -> None:
    """Check that the cards have units of this size, and not more than the kubelet can be sent.

    Raises PreflightError.
    """

    def units(mib: int) -> int:
        return sum(card_units(card.memory_mib, mib) for card in cards)

    fitting = client.fitting_unit(unit_mib, units)
    if fitting != unit_mib:
        raise PreflightError(
            f"units of {unit_mib} MiB are {units(unit_mib)} on this node, more than the kubelet can be sent: "
            f"the list would have {client.largest_bytes(units(unit_mib))} bytes, and it reads "
            f"{client.MESSAGE_BYTES}; use --unit {fitting}MiB or larger"
        )
    if not units(unit_mib):
        raise PreflightError(f"no card of this node has {unit_mib} MiB: use a smaller --unit")


def check_runtime(version: str, *, assume_cdi: bool) -> None:
    """Check that the container runtime serves CDI devices; others would ignore a lease silently.

    Raises PreflightError.
    """
    match = _RUNTIME.match(version)
    if match is None:
        _LOG.warning("container runtime %s is not known: it must serve CDI devices", version)
        return
    name, release = match[1], (int(match[2]), int(match[3]))
    if name == "containerd" and (release < (1, 7) or (release < (2, 0) and not assume_cdi)):
        raise PreflightError(
            f"{version} silently ignores the CDI devices that a lease is made of: use containerd 2.0 or newer"
            + ("" if release < (1, 7) else ", or set enable_cdi and start with --assume-cdi")
        )
    if name == "docker":
        raise PreflightError(f"{version} serves no CDI devices to the kubelet: use containerd 2.0")


def nvidia_by_default(host: Path) -> str | None:
    """Return a warning if an image can get all cards by its environment.

    host: where this process sees the node's root.
    """
    file = _default_runtime(host)
    if file is None or _read(host / _NVIDIA).get(_ACCEPT, True) is False:
        return None
    return (
        f"NVIDIA's runtime is the default ({file}), so a container whose image or pod sets "
        f"NVIDIA_VISIBLE_DEVICES=all gets every card without a request: set {_ACCEPT} = false in /{_NVIDIA}"
    )


def _default_runtime(host: Path) -> str | None:
    """Return the file, by its path on the node, that makes NVIDIA's runtime the default."""
    for path in _containerd_files(host):
        plugins = _tables(_read(path).get("plugins"))
        if any(
            _table(plugin.get("containerd")).get("default_runtime_name") == "nvidia"
            for plugin in plugins
        ):
            return f"/{path.relative_to(host)}"
    for path in (host / _CRIO / "crio.conf", *sorted((host / _CRIO).glob("crio.conf.d/*.conf"))):
        runtime = _table(_table(_read(path).get("crio")).get("runtime"))
        if runtime.get("default_runtime") == "nvidia":
            return f"/{path.relative_to(host)}"
    return None


def _containerd_files(host: Path) -> Iterator[Path]:
    config = host / _CONTAINERD
    yield config
    imports = _read(config).get("imports", [])
    for pattern in imports if isinstance(imports, list) else []:
        yield from sorted(host.glob(str(pattern).lstrip("/")))


def _read(path: Path) -> Mapping[str, Any]:
    """Read a TOML file; empty where it is missing or invalid."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    for each in _table(value).values():
        yield _table(each)


def check_mounts(directory: Path, proc: Path = Path("/proc")) -> None:
    """Check that the node sees what this process mounts below a directory.

    The container runtime must see the mounts of a lease. Raises PreflightError.
    """
    if _same(proc / "self/ns/mnt", proc / "1/ns/mnt"):
        return  # Not in a container.
    # Later mounts lie over earlier ones.
    mount = max(
        (
            mount
            for mount in reversed([*mounts("self", proc)])
            if directory.is_relative_to(mount.point)
        ),
        key=lambda mount: len(mount.point.parts),
    )
    if any(tag.startswith("shared:") for tag in mount.optional):
        return
    raise PreflightError(
        f"mounts below {mount.point} are not seen by the node, so no container could have a lease: mount "
        f"{directory.parent} with mountPropagation Bidirectional, and have it shared on the node "
        f"(mount --make-rshared /)"
    )


def _same(link: Path, other: Path) -> bool:
    try:
        return os.readlink(link) == os.readlink(other)
    except OSError:
        return False
