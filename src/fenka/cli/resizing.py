"""`fenka resize`: a job of this machine, or a pod of a cluster."""

import asyncio
from dataclasses import dataclass
from typing import Any

from fenka.cli import cluster, listing
from fenka.cli.cluster import Target
from fenka.cli.errors import UserError
from fenka.cluster.objects import Pod, pod_path
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE
from fenka.dialects.base import GIB_MIB, InvalidRecord
from fenka.dialects.resize import REFUSED, REQUEST, decode_status, encode_request
from fenka.dialects.sizes import parse_memory
from fenka.isolation.control import ComputeMode
from fenka.kubernetes.client import Api

WAIT_S = 10.0
"""For the node's program; it takes less than one."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to change; empty and None: as it is. container: of a pod, empty for its only one."""

    gpu_mem: str
    gpu_core: int | None
    gpu_core_mode: ComputeMode | None
    container: str = ""


def resize(target: Target, name: str, namespace: str, wanted: Wanted) -> None:
    """Resize the job of that name on this machine, else the pod. NAMESPACE/NAME is a pod, too."""
    if not wanted.gpu_mem and wanted.gpu_core is None and wanted.gpu_core_mode is None:
        raise UserError(
            "say what to change: --gpu-mem, --gpu-core or --gpu-core-mode", INVALID_INPUT
        )
    here = cluster.local(target)
    before, slash, after = name.partition("/")
    # A gang's member here has a slash in its name too.
    if here is not None and (not slash or any(job.name == name for job in here.jobs)):
        listing.resize(name, wanted.gpu_mem, wanted.gpu_core, wanted.gpu_core_mode)
        return
    if slash:
        namespace, name = before, after
    if wanted.gpu_core_mode is not None:
        raise UserError(
            "what a pod's share of compute means is said where it asks for it: leave --gpu-core-mode out",
            INVALID_INPUT,
        )
    if wanted.gpu_mem:
        parse_memory(wanted.gpu_mem, GIB_MIB)
    text = encode_request(wanted.container, wanted.gpu_mem, wanted.gpu_core)
    path = pod_path(namespace or cluster.namespace(target), name)

    async def question(api: Api) -> None:
        await _ask(api, path, text)

    cluster.ask(target, question)
    print(f"{name}: resized")


async def _ask(api: Api, path: str, text: str) -> None:
    pod = await api.get(path, Pod)
    if pod.status.phase != "Running":
        state = pod.status.phase or "Pending"
        raise UserError(
            f"{pod.full_name} is {state}: only what runs can be resized", TEMPORARY_FAILURE
        )
    # Of this very pod; what was refused before is no answer to this.
    body: dict[str, Any] = {
        "metadata": {"uid": pod.metadata.uid, "annotations": {REQUEST: text, REFUSED: None}}
    }
    await api.patch(path, Pod, body)
    for _ in range(round(WAIT_S / _LOOK_S)):
        pod = await api.get(path, Pod)
        if REFUSED in pod.metadata.annotations:
            raise UserError(pod.metadata.annotations[REFUSED])
        if _granted(pod, text):
            return
        await asyncio.sleep(_LOOK_S)
    raise UserError(
        f"nobody has answered within {WAIT_S:.0f} s: see whether fenka's program runs on node "
        f"{pod.spec.node_name}; the wish stays on the pod, as its annotation {REQUEST}",
        TEMPORARY_FAILURE,
    )


def _granted(pod: Pod, text: str) -> bool:
    try:
        record = decode_status(pod.metadata.annotations, pod.metadata.uid)
    except InvalidRecord:
        return False  # the node's program will correct it
    return record is not None and record.request == text
