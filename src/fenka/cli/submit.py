"""`fenka submit`: start a distributed training on a cluster or on this machine."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fenka.cli import workload_options
from fenka.cli.common_options import NamespaceOption, Target, group, register
from fenka.cli.error_report import print_error, print_progress, report_errors
from fenka.cli.startup import no_collection
from fenka.cli.workloads.arguments import TYPE_NAMES, report_submission
from fenka.cli.world import runs_here
from fenka.jobs.text_fields import parse_fields
from fenka.jobs.training import TrainingKind, TrainingSpec
from fenka.views.workloads import TRAINERS

_SUMMARIES: dict[TrainingKind, str] = {
    "mpi": "Submit a training that mpirun starts.",
    "tensorflow": "Submit a training of TensorFlow, with parameter servers or without.",
    "pytorch": "Submit a training of PyTorch.",
}

_REFUSED = {
    ("horovodjob", "horovod"): "use fenka submit mpijob, with mpirun",
    ("deepspeedjob", "deepspeed"): "use fenka submit pytorchjob, with torchrun",
    ("etjob", "et"): "use fenka submit pytorchjob, with torchrun",
    ("volcanojob", "vj", "volcano"): "use fenka submit pytorchjob; its processes start together",
    ("sparkjob", "spark"): "use Spark's own spark-submit",
    ("rayjob", "ray"): "use Ray's own ray job submit",
}

_ALIASES = {alias: names[0] for names in (*TYPE_NAMES.values(), *_REFUSED) for alias in names[1:]}


app = group("Submit a distributed training.", _ALIASES)


def _add(kind: TrainingKind, name: str, summary: str) -> None:
    """Add the command of one kind of training."""

    def submit(
        *,
        command: workload_options.ProgramArgument = None,
        file: workload_options.FileOption = None,
        follow: Annotated[
            bool, typer.Option("--follow", help="show the log; exit with the job's code")
        ] = False,
        dry_run: workload_options.DryRunOption = False,
        output: workload_options.DryRunOutputOption = "yaml",
        target: Target,
        namespace: NamespaceOption = "",
        **values: Any,
    ) -> None:
        spec = _training(kind, file, values, command or [])
        if dry_run:
            _print_objects(spec, target, namespace, output)
        else:
            _submit(spec, target, namespace, follow=follow)

    workload_options.add_options(submit, workload_options.TRAINING, kind)
    register(app, submit, summary, name=name, cls=workload_options.SubmitCommand)


for _kind, _summary in _SUMMARIES.items():
    _add(_kind, TRAINERS[_kind], _summary)
for _names, _instead in _REFUSED.items():
    workload_options.register_refused(app, "submit", _names[0], _instead)


def _training(
    kind: TrainingKind, file: Path | None, values: dict[str, Any], command: list[str]
) -> TrainingSpec:
    """Return the training of the options and the file. Raises UserError, InvalidRequest."""
    fields = workload_options.merged_fields(TrainingSpec, kind, file, values, command)
    spec = parse_fields({**fields, "kind": kind}, TrainingSpec)
    spec.validate()
    return spec


def _print_objects(
    spec: TrainingSpec, target: Target, namespace: str, output: workload_options.DryRunOutput
) -> None:
    from fenka.cli import cluster
    from fenka.jobs.collection import collect
    from fenka.jobs.manifests.training_manifest import render

    workload_options.refuse_local(target)
    rendered = render(*collect(spec))
    objects = [rendered.root, *rendered.dependents]
    workload_options.print_manifests(objects, namespace or cluster.namespace(target), output)


def _submit(spec: TrainingSpec, target: Target, namespace: str, *, follow: bool) -> None:
    if runs_here(target, namespace):
        _submit_here(spec, follow=follow)
    with no_collection():
        from fenka.cli.workloads.cluster_submission import submit_to_cluster

    submit_to_cluster(spec, target, namespace, follow=follow)


def _submit_here(spec: TrainingSpec, *, follow: bool) -> NoReturn:
    """Start the training on this machine, and exit: with its code if its log is followed."""
    from fenka.cli.workloads.local_backend import LocalBackend
    from fenka.cli.workloads.selection import follow_job
    from fenka.local.training_commands import submit
    from fenka.workstation import paths

    submit(paths.current(), spec, print_error, print_progress, report_errors)
    report_submission(spec.name, f"fenka get {spec.name}")
    if not follow:
        sys.exit(0)
    follow_job(LocalBackend(), spec.name)
