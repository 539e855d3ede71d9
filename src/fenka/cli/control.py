"""Commands that end existing workloads, change them, wait for them, attach to them or print their output."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NoReturn

import typer

from fenka.cli import cluster, common_options
from fenka.cli.error_report import UserError, print_error
from fenka.cli.quota import ask_daemon
from fenka.cli.tables import escape
from fenka.cli.workloads import waiting
from fenka.cli.workloads.arguments import (
    AllNamespacesOption,
    CommandArgument,
    ContainerOption,
    InstanceOption,
    JobTarget,
    LogRequest,
    NameArgument,
    NameOption,
    NamesArgument,
    RunOption,
    SomeNamesArgument,
    WorkloadChoice,
)
from fenka.cli.workloads.selection import (
    Backend,
    WorkloadNotFound,
    find,
    find_job,
    find_jobs_or_versions,
    is_here,
    open_backend,
)
from fenka.cli.workloads.waiting import polls, wait_until_available
from fenka.cli.world import snapshot_here
from fenka.cluster.objects import Pod, pod_path
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.dialects.base import GIB_MIB, InvalidRecord
from fenka.dialects.resize_records import FINAL, REFUSED, REQUEST, decode_status, encode_request
from fenka.formats.quantities import parse_memory
from fenka.jobs.service import parse_weights
from fenka.kubernetes.api_client import Api
from fenka.local import runs, training_commands
from fenka.local.records import TRAININGS
from fenka.views.workloads import ServiceVersion, TrainingJob, Workload, is_program
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection, known_snapshot, request_stop


def stop(
    target: JobTarget,
    names: SomeNamesArgument = None,
    every: Annotated[
        bool, typer.Option("--all", help="all programs and trainings of yours on this machine")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=common_options.seconds,
            metavar="TIME",
            help="between SIGTERM and SIGKILL on this machine: 10, 1m; default: 10",
        ),
    ] = None,
) -> None:
    """Stop all jobs named, even if some of them cannot be stopped."""
    names = names or []
    if every == bool(names):
        raise UserError("name the jobs to stop, or give --all alone", INVALID_INPUT)
    if every and (target.of_cluster or target.namespace):
        raise UserError(
            "--all stops jobs of this machine only: name those of a cluster", INVALID_INPUT
        )
    if every:
        names = _own_names()
        if not names:
            print("you have no jobs on this machine")
            return
    if every or is_here(target, *names):
        _stop_here(names, 10.0 if grace is None else grace)
        return
    from fenka.cli.workloads import cluster_submission

    for_each(names, lambda name: cluster_submission.stop(target, name))


def _own_names() -> list[str]:
    """Return what `stop` can be given of this user: gangs and trainings by their own name."""
    here = known_snapshot()
    own = [job for job in (here.jobs if here else ()) if job.uid == os.geteuid()]
    supervised = [name for name in TRAININGS.names() if training_commands.is_running(name)]
    # Those of a training or a service end with their supervisor.
    programs = [job.gang or job.name for job in own if job.kind in ("run", "notebook")]
    return [*dict.fromkeys([*programs, *supervised])]


def _stop_here(names: Sequence[str], grace: float) -> None:
    """Stop all jobs named, even if some of them cannot be stopped. grace: before SIGKILL, in seconds.

    Pending jobs are cancelled first: otherwise one could start when another has ended.
    """
    trainings = [name for name in names if TRAININGS.exists(name)]
    # The daemon would end their processes, which their supervisors may start again.
    pending = [name for name in trainings if not training_commands.is_running(name)]
    failures = list[str]()
    for name in pending:
        training_commands.stop(name)
        print(f"{name}: stopped")
    if others := [name for name in names if name not in trainings]:
        here = known_snapshot()
        jobs = here.jobs if here else []
        containers = {job.name for job in jobs if job.container_id}
        running = {name for job in jobs if job.state == "running" for name in (job.name, job.gang)}
        # Jobs of later requests must not start when jobs of an earlier request end.
        with DaemonConnection(paths.current()) as connection:
            answer = request_stop(
                connection, sorted(others, key=lambda name: name in running), grace
            )
        failures += answer.failures
        order = {name: number for number, name in enumerate(others)}
        for name in sorted(answer.stopped, key=lambda name: order.get(name, 0)):
            again = "; its engine may start it again" if name in containers else ""
            print(f"{escape(name)}: stopped{again}")
    for name in trainings:
        if name not in pending:
            training_commands.stop(name)
            print(f"{name}: stopped")
    if failures:
        raise UserError("; ".join(failures))


POLL_S = 0.2


def wait(
    target: JobTarget,
    name: NameArgument,
    choice: WorkloadChoice,
    run: RunOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            parser=common_options.seconds,
            metavar="TIME",
            help="give up then, with code 75",
        ),
    ] = None,
) -> None:
    """Wait for the end of a job, print how it ended, and exit with its exit code.

    For a service, wait until all replicas accept requests.
    """
    here = is_here(target, name)
    backend = open_backend(target, here=here)
    workload = None if run else _unless_program(backend, name, choice, here=here)
    if workload is None:
        _wait_for_program(name, run or 0, timeout)
    elif isinstance(workload, ServiceVersion):
        wait_until_available(backend, name, workload.version, timeout)
    else:
        for _ in polls(
            timeout, POLL_S if here else waiting.POLL_S, lambda: f"{name} has not ended yet"
        ):
            job = find_job(backend, name, choice.type_)
            if job.finished:
                sys.exit(backend.exit_code(job))


def _unless_program(
    backend: Backend, name: str, choice: WorkloadChoice, *, here: bool
) -> Workload | None:
    """Return the workload with this name; None for what only the daemon of this machine knows."""
    try:
        workload = find(backend, name, choice)
    except WorkloadNotFound:
        if here:
            return None
        raise
    return None if here and is_program(workload) else workload


def _wait_for_program(name: str, run: int, timeout: float | None) -> NoReturn:
    """Wait for the end of a program or notebook of this machine, and exit with its code."""
    for _ in polls(timeout, POLL_S, lambda: f"{name} has not ended yet"):
        answer = runs.ended(name, run)
        if not answer.present or (run and answer.jobs):
            break
    if not answer.jobs:
        which = f"run {run} of {name}" if run else f"a job called {name}"
        raise UserError(f"{which} is not known: `fenka ps -a` lists jobs")
    # Of a gang, the first member that failed: the others were ended because of it.
    failed = [job for job in answer.jobs if job.status != 0]
    job = min(failed or answer.jobs, key=lambda job: job.ended_at)
    print_error(f"{job.name}: {job.sentence}")
    code = job.exit_code
    if code is None:
        raise UserError(f"the exit code of {job.name} is not known")
    sys.exit(code)


WAIT_S = 10.0
"""For the node program; it takes less than one."""
_LOOK_S = 0.1


def resize(
    target: common_options.Target,
    name: Annotated[str, typer.Argument(help="a running job or pod, or NAMESPACE/NAME")],
    gpu_mem: common_options.MemoryOption = "",
    gpu_core: common_options.CoreOption = None,
    gpu_core_mode: common_options.CoreModeOption = None,
    container: Annotated[
        str, typer.Option("-c", "--container", help="for pods in which several have a slice")
    ] = "",
    namespace: common_options.NamespaceOption = "",
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
    here = snapshot_here(target)
    before, slash, after = name.partition("/")
    # A gang's member here has a slash in its name too.
    if here is not None and (not slash or any(job.name == name for job in here.jobs)):
        with DaemonConnection(paths.current()) as connection:
            request = protocol.ResizeJob(name, gpu_mem, gpu_core, gpu_core_mode)
            answer = connection.request(request, protocol.Done)
        # Its programs have the new limits within a second.
        print(f"{escape(answer.text)}: resized")
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


def prioritize(
    name: Annotated[str, typer.Argument(help="a pending or running job, or a gang")],
    priority: Annotated[
        int,
        typer.Option("--priority", metavar="N", help="larger numbers are served first"),
    ],
) -> None:
    """Give a job of this machine, or all members of a gang, another priority."""
    request = protocol.PrioritizeJob(name, priority)
    answer = ask_daemon(request, protocol.Done, "cannot change priorities")
    print(f"{escape(answer.text)}: priority {priority}")


async def _ask(api: Api, path: str, text: str, wait: bool) -> None:
    pod = await api.get(path, Pod)
    if pod.status.phase != "Running":
        state = pod.status.phase or "Pending"
        raise UserError(
            f"{pod.full_name} is {state}: only what runs can be resized", TEMPORARY_FAILURE
        )
    # Of this very pod; what was refused before is no answer to this.
    await _annotate(api, pod, {REQUEST: text, REFUSED: None, FINAL: None})
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
    """Say what becomes of a refused request, and withdraw it unless it may wait. Raises UserError.

    A request that can never be granted, as one that is larger than its card, does not wait.
    """
    why = pod.metadata.annotations[REFUSED]
    if wait and pod.metadata.annotations.get(FINAL) != "true":
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
    name: NameArgument,
    choice: WorkloadChoice,
    request: LogRequest,
) -> None:
    """Print the log of the chief or the oldest replica, or of the instance that is named."""
    name, instance = split_member(name, request.instance)
    here = is_here(target, name)
    backend = open_backend(target, here=here)
    workload = find(backend, name, choice)
    if request.run and not (here and is_program(workload)):
        raise UserError(f"{name} is no program of this machine: leave out --run", INVALID_INPUT)
    backend.logs(workload, replace(request, instance=instance))


def attach(
    target: JobTarget,
    name: NameArgument,
    choice: WorkloadChoice,
    command: CommandArgument = None,
    instance: InstanceOption = "",
    container: ContainerOption = "",
) -> None:
    """Run a command in an instance, connected to this terminal."""
    name, instance = split_member(name, instance)
    backend = open_backend(target)
    request = LogRequest(instance=instance, container=container)
    code = backend.attach(find(backend, name, choice), request, command or ["sh"])
    if code:
        sys.exit(code)


def split_member(name: str, instance: str) -> tuple[str, str]:
    """Return the workload and the instance: `night/0` is an instance of night, if none is named."""
    gang, _, member = name.partition("/")
    return (gang, name) if member.isdecimal() and not instance else (name, instance)


def delete(target: JobTarget, names: NamesArgument, choice: WorkloadChoice) -> None:
    """Delete all workloads named, even if some of them cannot be deleted."""
    backend = open_backend(target)
    for_each(names, lambda name: _delete(backend, name, choice))


def _delete(backend: Backend, name: str, choice: WorkloadChoice) -> str:
    """Delete a job, or a service with all its versions or with one. Return what to say of it."""
    if not choice.only_services:
        job, _ = find_jobs_or_versions(backend, name, choice)
        if job is not None:
            backend.delete_jobs([job])
            return _deleted(job)
    backend.delete_service(name, choice.version)
    return f"{f'version {choice.version} of ' if choice.version else ''}service {name}: deleted"


def for_each(names: Iterable[str], act: Callable[[str], str]) -> None:
    """Print what `act` returns for each name; raise UserError at the end if it has failed for some."""
    failures = []
    for name in dict.fromkeys(names):
        try:
            print(escape(act(name)), flush=True)
        except FenkaError as why:
            failures.append(str(why))
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
    age_s = common_options.parse_duration("--since", since)
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
        print(escape(_deleted(job)))


def _deleted(job: TrainingJob) -> str:
    """Return arena's words, but a notebook is no training."""
    noun = "notebook" if job.trainer == "notebook" else "training job"
    return f"The {noun} {job.name} has been deleted successfully"


def traffic_split(
    target: JobTarget,
    name: NameOption,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "-v",
            "--version-weight",
            metavar="VERSION:WEIGHT",
            help="percent of the requests; may be repeated",
        ),
    ] = None,
    http_route: Annotated[
        str,
        typer.Option(
            "--http-route", metavar="NAME", help="by this HTTPRoute of the Gateway API instead"
        ),
    ] = "",
) -> None:
    """Divide a service's requests among its versions."""
    shares = parse_weights(weights or [])
    open_backend(target).split(name, shares, http_route)
    text = ", ".join(f"{version} {weight}%" for version, weight in shares.items())
    print(f"{escape(name)}: {text}")
