"""`fenka stop`: end programs of this machine, or notebooks of a cluster.

`fenka wait`: wait until a job of this machine has ended.

`fenka resize`: a job of this machine, or a pod of a cluster.

`fenka logs` and `fenka attach`: what a job prints, and a command in one of its instances.

`fenka delete` and `fenka prune`: remove jobs with all that belongs to them.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from fenka.cli import cluster, jobs, options
from fenka.cli.errors import UserError, print_error
from fenka.cli.tables import escape
from fenka.cli.workloads.backend import (
    AllNamespacesOption,
    CommandArgument,
    ContainerOption,
    InstanceOption,
    JobTarget,
    LogRequest,
    SinceOption,
    TailOption,
    TimestampsOption,
    TypeOption,
)
from fenka.cli.workloads.local_logs import LogPart
from fenka.cli.workloads.selection import find_job, open_backend
from fenka.cli.world import runs_here
from fenka.cluster.objects import Pod, pod_path
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.dialects.base import GIB_MIB, InvalidRecord
from fenka.dialects.lease_records import REFUSED, REQUEST, decode_status, encode_request
from fenka.formats.quantities import parse_memory
from fenka.kubernetes.api_client import Api
from fenka.local import runs, training_commands
from fenka.local.records import TRAININGS
from fenka.views.workloads import TrainingJob
from fenka.workstation.client import known_snapshot
from fenka.workstation.protocol import EndedJob


def stop(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, help="seconds between SIGTERM and SIGKILL on this machine; default: 10"
        ),
    ] = None,
) -> None:
    """Stop all jobs named, even if some of them cannot be stopped."""
    if runs_here(target, target.namespace) or not (target.of_cluster or _elsewhere(names)):
        jobs.stop_here(names, 10.0 if grace is None else grace)
        return
    from fenka.cli.workloads import cluster_submission

    cluster_submission.stop(target, names)


def _elsewhere(names: list[str]) -> bool:
    """Return whether this machine has none of these jobs."""
    snapshot = known_snapshot()
    here = {
        name for job in (snapshot.jobs if snapshot else ()) for name in (job.name, job.gang, job.id)
    }
    return not any(TRAININGS.exists(name) or name in here for name in names)


POLL_S = 0.2


def wait(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a job, or its id")],
    run: Annotated[
        int | None, typer.Option("--run", metavar="N", min=1, help="this run; default: the last")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="give up then, with code 75"),
    ] = None,
) -> None:
    """Wait for the end of a job, print how it ended, and exit with its exit code."""
    deadline = None if timeout is None else time.monotonic() + timeout
    if not run and TRAININGS.exists(name):
        while not training_commands.record(name).finished:
            _sleep(name, deadline)
        sys.exit(training_commands.exit_code(name))
    while (answer := runs.ended(name, run or 0)).present and not (run and answer.jobs):
        _sleep(name, deadline)
    if not answer.jobs:
        which = f"run {run} of {name}" if run else f"a job called {name}"
        raise UserError(f"{which} is not known: `fenka ps -a` lists jobs", INVALID_INPUT)
    job = _decisive(answer.jobs)
    print_error(f"{job.name}: {job.sentence}")
    code = job.exit_code
    if code is None:
        raise UserError(f"the exit code of {job.name} is not known")
    sys.exit(code)


def _decisive(jobs: list[EndedJob]) -> EndedJob:
    """Return the job, or the first member of a gang that failed: the others were ended because of it."""
    failed = [job for job in jobs if job.status != 0]
    return min(failed or jobs, key=lambda job: job.ended_at)


def _sleep(name: str, deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise UserError(f"{name} has not ended yet", TEMPORARY_FAILURE)
    time.sleep(POLL_S)


WAIT_S = 10.0
"""For the node program; it takes less than one."""
_LOOK_S = 0.1


def resize(
    target: options.Target,
    name: Annotated[str, typer.Argument(help="a running job or pod, or NAMESPACE/NAME")],
    gpu_mem: options.MemoryOption = "",
    gpu_core: options.CoreOption = None,
    gpu_core_mode: options.CoreModeOption = None,
    container: Annotated[
        str, typer.Option("-c", "--container", help="for pods in which several have a slice")
    ] = "",
    namespace: options.NamespaceOption = "",
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
        jobs.resize_here(name, gpu_mem, gpu_core, gpu_core_mode)
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


def logs(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a job")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="print until the job ends")
    ] = False,
    instance: InstanceOption = "",
    container: ContainerOption = "",
    tail: TailOption = None,
    since: SinceOption = "",
    timestamps: TimestampsOption = False,
    run: Annotated[
        int | None,
        typer.Option(
            "--run",
            metavar="N",
            min=1,
            help="this run of the name, on this machine; default: the last",
        ),
    ] = None,
) -> None:
    """Print the log of a job's chief, or of the instance that is named."""
    since_s = options.parse_duration("--since", since) if since else None
    elsewhere = target.of_cluster or TRAININGS.exists(name)
    if not elsewhere and (jobs.has_log(name) or _local(target)):
        if instance or container:
            raise UserError(f"{name} is one process with one log: leave out -i and -c")
        jobs.print_log(name, LogPart(tail, since_s, timestamps), follow=follow, run=run or 0)
        return
    if run:
        raise UserError(f"{name} is no program of this machine: leave out --run", INVALID_INPUT)
    request = LogRequest(follow, instance, container, tail, since_s, timestamps)
    open_backend(target).logs(name, request)


def _local(target: JobTarget) -> bool:
    """Return whether this machine's daemon answers, or is to."""
    from fenka.cli import cluster

    return cluster.local(target) is not None


def attach(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the job")],
    command: CommandArgument = None,
    instance: InstanceOption = "",
    container: ContainerOption = "",
) -> None:
    """Run a command in an instance, connected to this terminal."""
    backend = open_backend(target)
    request = LogRequest(instance=instance, container=container)
    code = backend.attach(find_job(backend, name), request, command or ["sh"])
    if code:
        sys.exit(code)


def delete(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    type_: TypeOption = None,
) -> None:
    """Delete all jobs named, even if some of them cannot be deleted."""
    backend, failures = open_backend(target), []
    for name in dict.fromkeys(names):
        try:
            backend.delete_jobs([find_job(backend, name, type_)])
        except FenkaError as why:
            failures.append(str(why))
        else:
            _report(name)
    if failures:
        raise UserError("; ".join(failures))


def prune(
    target: JobTarget,
    since: Annotated[
        str,
        typer.Option("-s", "--since", metavar="TIME", help="ended longer ago than, such as 10h"),
    ],
    all_namespaces: AllNamespacesOption = False,
) -> None:
    """Delete jobs that ended some time ago."""
    age_s = options.parse_duration("--since", since)
    backend = open_backend(target, all_namespaces=all_namespaces)
    now = time.time()
    ended: Sequence[TrainingJob] = [
        job
        for job in backend.jobs()
        if job.finished
        # A notebook is started again.
        and job.status != "STOPPED"
        and not job.foreign
        and now - (job.ended or job.created) > age_s
    ]
    if not ended:
        print(f"no job has ended more than {since} ago")
        return
    backend.delete_jobs(ended)
    for job in ended:
        _report(job.name)


def _report(name: str) -> None:
    print(f"The training job {escape(name)} has been deleted successfully")
