"""A training as processes of this machine: who has a lease, who decides, what each is told."""

import json
from typing import Any

import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.job_spec import GpuResources
from fenka.jobs.training import TensorFlowRole, TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.local import training_plan, workload


def training(**fields: Any) -> TrainingSpec:
    """Return a training of PyTorch, changed."""
    defaults: dict[str, Any] = {"kind": "pytorch", "name": "job", "command": ["python", "x.py"]}
    return TrainingSpec(**defaults | fields)


TF = {
    "kind": "tensorflow",
    "workers": 2,
    "gpu_mem": "4",
    "ps": TensorFlowRole(replicas=1),
    "chief": TensorFlowRole(replicas=1, gpu_mem="7"),
    "evaluator": TensorFlowRole(replicas=1),
}


def test_processes_with_cards_are_one_gang_when_roles_differ() -> None:
    """The parameter server and the evaluator have no lease, and each other process has its own amount."""
    spec = training(**TF, time_limit_s=60.0, priority="-3")
    planned = training_plan.processes(spec)
    assert [(each.name, each.lease) for each in planned] == [
        ("job-chief-0", 0),
        ("job-worker-0", 1),
        ("job-worker-1", 2),
        ("job-ps-0", None),
        ("job-evaluator-0", None),
    ]
    request = training_plan.lease_request(spec, planned, "/here")
    assert request is not None
    assert request.members == [GpuResources("7"), GpuResources("4"), GpuResources("4")]
    assert (request.gang, request.name, request.priority, request.directory) == (
        3,
        "job",
        -3,
        "/here",
    )
    assert request.time_limit_s == 61


def test_nothing_is_requested_when_no_process_has_cards() -> None:
    """Such a training needs no daemon."""
    spec = training(workers=2)
    assert training_plan.lease_request(spec, training_plan.processes(spec), "/") is None


@pytest.mark.parametrize(
    ("fields", "required"),
    [
        ({"workers": 2}, ["job-master-0", "job-worker-0"]),
        ({"kind": "mpi", "workers": 2}, ["job-launcher-0"]),
        (TF, ["job-chief-0"]),
        (
            {**TF, "success_policy": "AllWorkers"},
            ["job-chief-0", "job-worker-0", "job-worker-1"],
        ),
        (
            {"kind": "tensorflow", "workers": 2, "ps": TensorFlowRole(replicas=1)},
            ["job-worker-0"],
        ),
        ({"kind": "tensorflow", "workers": 1}, ["job-chief-0"]),
    ],
)
def test_training_succeeds_when_the_required_processes_have(
    fields: dict[str, Any], required: list[str]
) -> None:
    """The framework and --success-policy decide which these are."""
    planned = training_plan.processes(training(**fields))
    assert [process.name for process in planned if process.required] == required
    assert [process.chief for process in planned].count(True) == 1
    assert planned[0].chief


def test_processes_know_each_other_by_ports_of_the_loopback_address() -> None:
    """Each has one of its own. The evaluator is no part of the cluster."""
    spec = training(**TF)
    planned = training_plan.processes(spec)
    ports = {process.address: 1000 + number for number, process in enumerate(planned)}
    worker = training_plan.environment(spec, planned[2], ports, restarts=3)
    config = json.loads(worker["TF_CONFIG"])
    assert config == {
        "cluster": {
            "chief": ["127.0.0.1:1000"],
            "worker": ["127.0.0.1:1001", "127.0.0.1:1002"],
            "ps": ["127.0.0.1:1003"],
        },
        "task": {"type": "worker", "index": 1},
        "environment": "cloud",
    }
    assert (worker["FENKA_RESTARTS"], worker["FENKA_INDEX"]) == ("3", "1")


def test_variables_of_the_user_prevail() -> None:
    """A process without cards sees none, which the user may change, too."""
    spec = training(env={"LR": "0.1", "WORLD_SIZE": "7"})
    (process,) = training_plan.processes(spec)
    variables = training_plan.environment(spec, process, {process.address: 5}, restarts=0)
    assert (variables["LR"], variables["WORLD_SIZE"]) == ("0.1", "7")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["MASTER_PORT"] == "5"


def test_backfill_has_the_lowest_priority() -> None:
    """Every other request is served first."""
    spec = training(gpu_mem="4", backfill=True)
    request = training_plan.lease_request(spec, training_plan.processes(spec), "/")
    assert request is not None
    assert request.priority == -1_000_000


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"data": ["a:/b"]}, "--data requires a cluster: use --data-dir DIRECTORY"),
        ({"toleration": ["all"]}, "--toleration requires a cluster: leave it out"),
        ({"selector": {"a": "b"}}, "--selector requires a cluster: leave it out"),
        (
            {"ps": TensorFlowRole(memory="4Gi")},
            "--ps-memory requires a cluster: no limit of memory is enforced here, so leave it out",
        ),
        ({"ttl_after_finished_s": 5.0}, "--ttl-after-finished requires a cluster: use fenka prune"),
    ],
)
def test_option_is_refused_when_it_requires_a_cluster(
    fields: dict[str, Any], sentence: str
) -> None:
    """A limit that would not be enforced is an error, too."""
    with pytest.raises(InvalidRequest) as refused:
        training_plan.refuse_cluster_options(training(**fields))
    assert str(refused.value) == sentence


def test_options_are_named_when_they_have_no_effect() -> None:
    """The same line as for a cluster works."""
    spec = training(image="a", label={"x": "y"}, interruptible=True, worker=RoleSpec(gpus=1))
    training_plan.refuse_cluster_options(spec)
    announced: list[str] = []
    workload.announce_ignored(spec, announced.append)
    assert announced == ["--image, --label, --interruptible have no effect on a workstation"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"priority": "high", "gpu_mem": "4"},
            "invalid --priority 'high': on a workstation it is a number, larger ones are served first",
        ),
        ({"workers": 257}, "a training on a workstation has at most 256 processes, not 257"),
    ],
)
def test_training_is_rejected_when_this_machine_cannot_run_it(
    fields: dict[str, Any], sentence: str
) -> None:
    """One sentence says what to change."""
    spec = training(**fields)
    with pytest.raises(InvalidRequest) as rejected:
        training_plan.lease_request(spec, training_plan.processes(spec), "/")
    assert str(rejected.value) == sentence
