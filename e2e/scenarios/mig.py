"""Helpers for MIG scenarios: pods on instances, and the instances that the driver of a node has."""

import json
from typing import Any

from e2e.scenarios.containers import card_server_pod, pod
from e2e.scenarios.installation import MEMORY, Installation

A100, A30 = "sd-cluster-04", "sd-cluster-05"
"""The nodes, by their card."""
PREFIX = "nvidia.com/mig-"

DRIVER = """
import json, sys
from pathlib import Path
from fenka.hardware import nvml_mig as mig_instances
from fenka.hardware.nvml import Driver
with Driver.open(Path("/run/fenka/simulated/lib")) as driver:
    card = driver.cards()[0].uuid
    geometry = driver.geometry(card)
"""
LIST = """
    listed = mig_instances.instances(card, geometry)
    print(json.dumps(sorted(f"{each.start} {each.profile.name}" for each in listed)))
"""
CREATE = """
    gpu = mig_instances.create_gpu_instance(card, geometry.by_name[sys.argv[1]], int(sys.argv[2]))
    mig_instances.create_compute_instance(card, gpu)
"""
DESTROY_ALL = """
    for gpu in mig_instances.instances(card, geometry):
        for compute in gpu.compute:
            mig_instances.destroy_compute_instance(card, gpu.id, compute.id)
        mig_instances.destroy_gpu_instance(card, gpu.id)
"""
USED = """
    import pynvml
    handle = pynvml.nvmlDeviceGetHandleByUUID(card)
    used = []
    for index in range(7):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        used.append(pynvml.nvmlDeviceGetMemoryInfo(instance).used >> 20)
    print(json.dumps(sorted(used)))
"""


def with_driver(installation: Installation, node: str, program: str, *arguments: str) -> str:
    """Run one of the programs above as an administrator of the node, who uses the driver directly."""
    server = card_server_pod(installation, node)
    words = ("python3", "-c", DRIVER + program, *arguments)
    return installation.cluster.kubectl("-n", "fenka", "exec", server, "--", *words)


def layout(installation: Installation, node: str) -> list[str]:
    """Return the instances that the node's driver has, as `start profile`."""
    listed: list[str] = json.loads(with_driver(installation, node, LIST))
    return listed


def instance_pod(name: str, profile: str, command: str = "") -> str:
    """Return a pod that has an instance of its own."""
    return _pod(name, {f"{PREFIX}{profile}": 1}, command)


def slice_pod(name: str, units: int, inside: str | None, command: str, **spec: Any) -> str:
    """Return a pod that has a slice in an instance. inside: None if its node says so."""
    manifest = json.loads(_pod(name, {MEMORY: units}, command))
    if inside is not None:
        manifest["metadata"]["annotations"] = {"fenka.io/inside": inside}
    manifest["spec"] |= spec
    return json.dumps(manifest)


def _pod(name: str, limits: dict[str, int], command: str) -> str:
    manifest = json.loads(pod(name, f"x=0:{command}"))
    manifest["metadata"]["labels"] = {"app": "mig"}
    (container,) = manifest["spec"]["containers"]
    container["resources"] = {"limits": limits}
    return json.dumps(manifest)


def place_of(manifest: dict[str, Any]) -> tuple[int, str]:
    """Return start and profile of a pod's only instance, as its annotation has them."""
    (place,) = json.loads(manifest["metadata"]["annotations"]["fenka.io/instance"])
    return place["start"], place["profile"]
