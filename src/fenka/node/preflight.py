"""What this node must be like, looked at once at the start: each finding is one sentence."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fenka.isolation.processes import mounts

_CONTAINERD = Path("etc/containerd/config.toml")
_CRIO = Path("etc/crio")
_NVIDIA = Path("etc/nvidia-container-runtime/config.toml")
_ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"


def nvidia_by_default(host: Path) -> str | None:
    """Whether an image can get all cards by its environment; the sentence, or None.

    host: where this process sees the node's own root.
    """
    where = _default_runtime(host)
    if where is None or _read(host / _NVIDIA).get(_ACCEPT, True) is False:
        return None
    return (
        f"NVIDIA's runtime is the default ({where}), so a container whose image or pod sets "
        f"NVIDIA_VISIBLE_DEVICES=all gets every card unasked: set {_ACCEPT} = false in /{_NVIDIA}"
    )


def _default_runtime(host: Path) -> str | None:
    """The file that makes it the default, as the node calls it."""
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
    first = host / _CONTAINERD
    yield first
    imports = _read(first).get("imports", [])
    for pattern in imports if isinstance(imports, list) else []:
        yield from sorted(host.glob(str(pattern).lstrip("/")))


def _read(path: Path) -> Mapping[str, Any]:
    """A TOML file; empty where there is none, or none that is understood."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    for each in _table(value).values():
        yield _table(each)


def unseen_mounts(directory: Path, proc: Path = Path("/proc")) -> str | None:
    """Whether what this process mounts below a directory stays its own; the sentence, or None.

    Containers are started by another program, which must see the mounts of a lease.
    """
    if _same(proc / "self/ns/mnt", proc / "1/ns/mnt"):
        return None  # not in a container
    # Later ones lie over earlier ones.
    mount = max(
        (it for it in reversed([*mounts("self", proc)]) if directory.is_relative_to(it.point)),
        key=lambda it: len(it.point.parts),
    )
    if any(it.startswith("shared:") for it in mount.optional):
        return None
    return (
        f"mounts below {mount.point} are not seen by the node, so no container could have a lease: mount "
        f"{directory.parent} with mountPropagation Bidirectional, and have it shared on the node "
        f"(mount --make-rshared /)"
    )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.readlink(one) == os.readlink(other)
    except OSError:
        return False
