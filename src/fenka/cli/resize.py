"""`fenka resize`: a job of this machine, or a pod of a cluster."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from fenka.cli import cluster, jobs
from fenka.cli.errors import UserError
from fenka.cli.options import CoreModeOption, CoreOption, MemoryOption, NamespaceOption, Target
from fenka.cluster.objects import Pod, pod_path
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE
from fenka.dialects.base import GIB_MIB, InvalidRecord
from fenka.dialects.resize import REFUSED, REQUEST, decode_status, encode_request
from fenka.dialects.sizes import parse_memory
from fenka.kubernetes.client import Api

WAIT_S = 10.0
"""For the node program; it takes less than one."""
_LOOK_S = 0.1


def resize(
    target: Target,
    name: Annotated[str, typer.Argument(help="a running job or pod, or NAMESPACE/NAME")],
    gpu_mem: MemoryOption = "",
    gpu_core: CoreOption = None,
    gpu_core_mode: CoreModeOption = None,
    container: Annotated[
        str, typer.Option("-c", "--container", help="for pods in which several have a slice")
    ] = "",
    namespace: NamespaceOption = "",
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait",
            help="whether a pod's request that is refused now stays, and is granted when it fits",
        ),
    ] = True,
) -> None:
    """Resize the job of that name on this machine, else the pod. NAMESPACE/NAME is a pod, too."""
    if container or namespace:
        target = replace(target, cluster=True)
    if not gpu_mem and gpu_core is None and gpu_core_mode is None:
        raise UserError(
            "nothing to change: give --gpu-mem, --gpu-core or --gpu-core-mode", INVALID_INPUT
        )
    here = cluster.local(target)
    before, slash, after = name.partition("/")
    # A gang's member here has a slash in its name too.
    if here is not None and (not slash or any(job.name == name for job in here.jobs)):
        jobs.resize(name, gpu_mem, gpu_core, gpu_core_mode)
        return
    if slash:
        namespace, name = before, after
    if gpu_core_mode is not None:
        raise UserError(
            "--gpu-core-mode cannot be changed for a pod: its annotation fenka.io/core-mode is read when it "
            "starts, so change that in its manifest",
            INVALID_INPUT,
        )
    if gpu_mem:
        parse_memory(gpu_mem, GIB_MIB)
    text = encode_request(container, gpu_mem, gpu_core)
    path = pod_path(namespace or cluster.namespace(target), name)

    cluster.ask(target, lambda api: _ask(api, path, text, wait))
    print(f"{name}: resized")


async def _ask(api: Api, path: str, text: str, wait: bool) -> None:
    pod = await api.get(path, Pod)
    if pod.status.phase != "Running":
        state = pod.status.phase or "Pending"
        raise UserError(
            f"{pod.full_name} is {state}: only what runs can be resized", TEMPORARY_FAILURE
        )
    # Of this very pod; what was refused before is no answer to this.
    await _annotate(api, pod, {REQUEST: text, REFUSED: None})
    for _ in range(round(WAIT_S / _LOOK_S)):
        pod = await api.get(path, Pod)
        if _granted(pod, text):
            return
        if REFUSED in pod.metadata.annotations:
            await _settle_refusal(api, pod, text, wait)
            return
        await asyncio.sleep(_LOOK_S)
    raise UserError(
        f"resize not confirmed within {WAIT_S:.0f} s: check that fenka-node runs on node "
        f"{pod.spec.node_name}; the request stays in annotation {REQUEST} and will be retried",
        TEMPORARY_FAILURE,
    )


async def _settle_refusal(api: Api, pod: Pod, text: str, wait: bool) -> None:
    """Say what becomes of a refused request, and withdraw it unless it may wait. Raises UserError."""
    why = pod.metadata.annotations[REFUSED]
    if wait:
        raise UserError(
            f"{why}; the request stays, and is granted as soon as it fits: repeat the command with "
            "--no-wait to withdraw it",
            TEMPORARY_FAILURE,
        )
    if not _granted(await _annotate(api, pod, {REQUEST: None}), text):
        raise UserError(f"{why}; the request is withdrawn")


async def _annotate(api: Api, pod: Pod, annotations: Mapping[str, str | None]) -> Pod:
    body = {"metadata": {"uid": pod.metadata.uid, "annotations": annotations}}
    return await api.patch(pod.path, Pod, body)


def _granted(pod: Pod, text: str) -> bool:
    try:
        record = decode_status(pod.metadata.annotations, pod.metadata.uid)
    except InvalidRecord:
        return False  # the node program will correct it
    return record is not None and record.request == text
