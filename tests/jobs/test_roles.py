"""Test the processes of trainings and their environment."""

import json
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.jobs import roles
from fenka.jobs.roles import RoleName
from fenka.jobs.training import TensorFlowRole, TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.views.workloads import TRAINERS, instance_name


def host(role: RoleName, index: int) -> str:
    """Return the address of a process."""
    return f"j-{role}-0-{index}.j"


def port(role: RoleName, index: int) -> int:
    """Return its port."""
    return 2222


def training(kind: str, **fields: object) -> TrainingSpec:
    """Return a training."""
    return TrainingSpec(kind=kind, name="j", command=["a"], image="i", **fields)  # type: ignore[arg-type]


PS = TensorFlowRole(replicas=2, cpu="2")
ONE = TensorFlowRole(replicas=1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (training("mpi", workers=3), [("launcher", 1, True), ("worker", 3, False)]),
        (training("pytorch", workers=4), [("worker", 4, True)]),
        (training("pytorch"), [("worker", 1, True)]),
        (training("tensorflow"), [("chief", 1, True)]),
        (training("tensorflow", workers=2), [("worker", 2, True)]),
        (training("tensorflow", ps=PS), [("worker", 1, True), ("ps", 2, False)]),
        (
            training("tensorflow", workers=2, ps=PS, chief=ONE, evaluator=ONE),
            [("chief", 1, True), ("worker", 2, False), ("ps", 2, False), ("evaluator", 1, False)],
        ),
    ],
)
def test_roles_are_those_of_the_framework(
    spec: TrainingSpec, expected: list[tuple[str, int, bool]]
) -> None:
    """Test that roles are those of the framework."""
    assert [(role.name, role.replicas, role.chief) for role in roles.roles(spec)] == expected


def test_only_workers_have_cards_when_other_roles_request_none() -> None:
    """Test that only workers have cards when other roles request none."""
    spec = training("tensorflow", gpu_mem="4", cpu="1", workers=2, ps=PS, chief=ONE)
    by_name = {role.name: role for role in roles.roles(spec)}
    assert by_name["worker"].gpu == spec.gpu
    assert by_name["ps"].gpu is None
    assert by_name["ps"].resources == RoleSpec(image="i", cpu="2")
    assert by_name["chief"].gpu is None


def test_launcher_has_neither_cards_nor_the_workers_processors() -> None:
    """Test that launcher has neither cards nor the workers processors."""
    launcher, worker = roles.roles(training("mpi", gpus=1, cpu="4", selector={"a": "b"}))
    assert launcher.resources == RoleSpec(image="i", selector={"a": "b"})
    assert worker.resources == RoleSpec(image="i", gpus=1, cpu="4", selector={"a": "b"})
    assert not worker.runs_command


def test_workers_own_options_replace_those_of_the_training() -> None:
    """Test that workers own options replace those of the training."""
    spec = training("tensorflow", workers=2, cpu="1", worker=RoleSpec(image="w", memory="1Gi"))
    (worker,) = roles.roles(spec)
    assert worker.resources == RoleSpec(image="w", cpu="1", memory="1Gi")


def test_tf_config_names_all_but_the_evaluator() -> None:
    """Test that tf config names all but the evaluator."""
    spec = training("tensorflow", workers=2, ps=ONE, chief=ONE, evaluator=ONE)
    worker = next(role for role in roles.roles(spec) if role.name == "worker")
    variables = roles.environment(spec, worker, "$(FENKA_INDEX)", host, port)
    assert variables["TF_CONFIG"] == (
        '{"cluster": {"chief": ["j-chief-0-0.j:2222"], '
        '"worker": ["j-worker-0-0.j:2222", "j-worker-0-1.j:2222"], "ps": ["j-ps-0-0.j:2222"]}, '
        '"task": {"type": "worker", "index": $(FENKA_INDEX)}, "environment": "cloud"}'
    )
    assert json.loads(variables["TF_CONFIG"].replace("$(FENKA_INDEX)", "1"))["task"]["index"] == 1


@pytest.mark.parametrize(
    ("fields", "master", "nproc"),
    [
        ({"workers": 2}, "j-worker-0-0.j", "1"),
        ({"workers": 1}, "localhost", "1"),
        ({"workers": 2, "gpus": 4}, "j-worker-0-0.j", "4"),
        ({"workers": 2, "gpus": 4, "nproc_per_node": "auto"}, "j-worker-0-0.j", "auto"),
    ],
)
def test_torchrun_needs_no_options(fields: dict[str, object], master: str, nproc: str) -> None:
    """Test that torchrun needs no options."""
    spec = training("pytorch", **fields)
    (worker,) = roles.roles(spec)
    assert roles.environment(spec, worker, "1", host, port) == {
        "FENKA_JOB": "j",
        "workers": str(spec.workers),
        "gpus": str(spec.gpus),
        "RANK": "1",
        "WORLD_SIZE": str(spec.workers),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": master,
        "MASTER_PORT": "2222",
        "PET_NNODES": str(spec.workers),
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": nproc,
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": "2222",
    }


@pytest.mark.parametrize(
    ("fields", "slots"), [({}, 1), ({"gpus": 2}, 2), ({"gpu_mem": "4", "cards": 3}, 3)]
)
def test_slots_are_the_cards_of_a_worker(fields: dict[str, object], slots: int) -> None:
    """Test that slots are the cards of a worker."""
    assert roles.slots(training("mpi", **fields)) == slots


def test_hostfile_has_the_form_of_each_mpi() -> None:
    """Test that hostfile has the form of each mpi."""
    assert roles.hostfile(["a", "b"], 2, hydra=False) == "a slots=2\nb slots=2\n"
    assert roles.hostfile(["a", "b"], 2, hydra=True) == "a:2\nb:2\n"


def test_both_mpis_start_their_daemons_by_the_agent() -> None:
    """Test that both mpis start their daemons by the agent."""
    variables = roles.mpi_environment(*map(PurePosixPath, ("/m/agent", "/m/hosts", "/m/hydra")))
    assert variables["OMPI_MCA_plm_rsh_agent"] == variables["HYDRA_LAUNCHER_EXEC"] == "/m/agent"
    assert variables["OMPI_MCA_orte_default_hostfile"] == "/m/hosts"
    assert variables["HYDRA_HOST_FILE"] == "/m/hydra"


@given(
    kind=st.sampled_from(["mpi", "tensorflow", "pytorch"]),
    workers=st.integers(1, 5),
    others=st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)),
)
def test_every_training_has_one_chief_and_different_members(
    kind: str, workers: int, others: tuple[int, int, int]
) -> None:
    """Test that every training has one chief and different members."""
    ps, chief, evaluator = others if kind == "tensorflow" else (0, 0, 0)
    spec = training(
        kind,
        workers=workers,
        ps=TensorFlowRole(replicas=ps),
        chief=TensorFlowRole(replicas=chief),
        evaluator=TensorFlowRole(replicas=evaluator),
    )
    spec.validate()
    members = [
        instance_name("j", TRAINERS[kind], role.name, index)
        for role in roles.roles(spec)
        for index in range(role.replicas)
    ]
    assert len(set(members)) == len(members) == workers + (kind == "mpi") + ps + chief + evaluator
    assert [role.chief for role in roles.roles(spec)].count(True) == 1
    assert roles.roles(spec)[0].chief


def test_number_of_cards_is_the_workers_in_every_role() -> None:
    """arena's users compute the ranks from it: `mpirun -np $((workers*gpus))`."""
    for spec in (
        training("mpi", workers=2, gpus=1),
        training("tensorflow", workers=2, gpus=1, ps=ONE, chief=TensorFlowRole(gpus=3, replicas=1)),
    ):
        for role in roles.roles(spec):
            variables = roles.environment(spec, role, "0", host, port)
            assert (variables["workers"], variables["gpus"]) == ("2", "1")
