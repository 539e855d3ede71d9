"""Training jobs of a cluster: statuses, instances and cards, from one reading of its objects."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Node
from fenka.cluster.training_objects import (
    JOB,
    QUEUE_NAME,
    BatchJob,
    ForeignJob,
    JobSet,
    Root,
    Service,
    TrainingObjects,
    TrainingPod,
)
from fenka.dialects import ack, base
from fenka.views.cluster_workloads import training_jobs
from fenka.views.workloads import CardUse, JobStatus, TrainingJob
from tests.builders import Json, node, on_card, sharing, units, unschedulable
from tests.training_builders import (
    NOON,
    batch_job,
    condition,
    foreign_job,
    job_set,
    member,
    moment,
)

MPI = {"launcher": 1, "worker": 2}


def read(
    *roots: Json,
    pods: list[Json] | None = None,
    nodes: list[Json] | None = None,
    foreign: list[Json] | None = None,
    services: list[Json] | None = None,
    tensorboards: list[Json] | None = None,
    now: float = NOON + 600,
) -> list[TrainingJob]:
    """Return the jobs that these objects are."""
    objects = TrainingObjects(
        [_root(root) for root in roots],
        msgspec.json.decode(msgspec.json.encode(foreign or []), type=list[ForeignJob]),
        msgspec.convert(pods or [], list[TrainingPod]),
        msgspec.convert(services or [], list[Service]),
        None if nodes is None else msgspec.convert(nodes, list[Node]),
        tensorboards=msgspec.convert(tensorboards or [], list[Service]),
    )
    return training_jobs(objects, now)


def _root(root: Json) -> Root:
    kind: type[Root] = JobSet if root["kind"] == "JobSet" else BatchJob
    return msgspec.convert(root, kind)


def mpi(**given: Any) -> Json:
    """Return the root of an MPI job with two workers."""
    return job_set("j", roles=MPI, **given)


def workers(**given: Any) -> list[Json]:
    """Return both workers of it."""
    return [member("j", "worker", index, **given) for index in (0, 1)]


RUNNING = [member("j", "launcher", node="a"), *workers(node="a")]


@pytest.mark.parametrize(
    ("root", "pods", "status"),
    [
        pytest.param(mpi(suspend=True), [], "QUEUING", id="suspended"),
        pytest.param(mpi(), [], "PENDING", id="no pod exists"),
        pytest.param(mpi(), workers(), "PENDING", id="no worker has a node"),
        pytest.param(mpi(), workers(node="a"), "PENDING", id="the launcher comes last"),
        pytest.param(mpi(), RUNNING, "RUNNING", id="all run"),
        pytest.param(mpi(), [*RUNNING[:2], member("j", "worker", 1)], "PENDING", id="one waits"),
        pytest.param(
            mpi(),
            [*RUNNING[:2], member("j", "worker", 1, node="a", deleted=moment(5))],
            "PENDING",
            id="one is being deleted",
        ),
        pytest.param(
            mpi(),
            [*RUNNING[:2], member("j", "worker", 1, node="a", phase="Failed")],
            "PENDING",
            id="one has failed, and all start anew",
        ),
        pytest.param(
            mpi(),
            [*RUNNING[:2], member("j", "worker", 1, node="a", phase="Succeeded")],
            "RUNNING",
            id="one has succeeded",
        ),
        pytest.param(mpi(conditions=[condition("Completed")]), [], "SUCCEEDED", id="completed"),
        pytest.param(mpi(conditions=[condition("Failed")]), RUNNING, "FAILED", id="failed"),
        pytest.param(
            mpi(conditions=[{"type": "Completed", "status": "False"}]),
            RUNNING,
            "RUNNING",
            id="false",
        ),
        pytest.param(
            mpi(suspend=True, conditions=[condition("Completed")]),
            [],
            "SUCCEEDED",
            id="suspended after",
        ),
        pytest.param(
            batch_job("j", "pytorch", "worker", conditions=[condition("Complete")]),
            [],
            "SUCCEEDED",
            id="a job of one pod",
        ),
        pytest.param(
            batch_job("j", "pytorch", "worker"),
            [member("j", "worker", node="a")],
            "RUNNING",
            id="one pod",
        ),
    ],
)
def test_status_follows_the_root_and_the_pods_that_must_run(
    root: Json, pods: list[Json], status: JobStatus
) -> None:
    """QUEUING, PENDING, RUNNING, SUCCEEDED and FAILED."""
    (job,) = read(root, pods=pods)
    assert job.status == status


def test_instances_are_the_launcher_and_the_workers_when_all_run() -> None:
    """The launcher is the chief and comes first."""
    (job,) = read(mpi(), pods=RUNNING, nodes=[node("a", address="10.0.0.7")])
    assert [(each.name, each.pod, each.chief, each.node_address) for each in job.instances] == [
        ("j-launcher-0", "j-launcher-0-0-x7k2p", True, "10.0.0.7"),
        ("j-worker-0", "j-worker-0-0-x7k2p", False, "10.0.0.7"),
        ("j-worker-1", "j-worker-0-1-x7k2p", False, "10.0.0.7"),
    ]


def test_instances_are_those_that_have_finished_when_the_job_has_ended() -> None:
    """The article's last picture: the launcher alone, and its node is gone."""
    pods = [member("j", "launcher", node="a", phase="Succeeded"), *workers(node="a")]
    (job,) = read(mpi(conditions=[condition("Completed", 720)]), pods=pods, nodes=[])
    assert [(each.name, each.node_address) for each in job.instances] == [("j-launcher-0", "")]
    assert job.ended == NOON + 720


def test_instances_are_those_of_the_last_attempt_when_the_job_was_restarted() -> None:
    """One pod for each role and index, whatever is left of earlier attempts."""
    old = member("j", "worker", 0, node="a", name="old", attempt=0, deleted=moment(5))
    new = member("j", "worker", 0, name="new", attempt=1, created=moment(9))
    (job,) = read(mpi(), pods=[new, old])
    assert [each.pod for each in job.instances] == ["new"]


def test_pods_of_a_deleted_job_of_the_same_name_are_not_shown() -> None:
    """They are older than the root object."""
    assert read(mpi(created=moment(60)), pods=RUNNING)[0].instances == ()


def test_pods_that_the_root_does_not_declare_are_not_shown() -> None:
    """Anybody in the namespace can label a pod."""
    strays = [
        member("j", "worker", 2, node="a"),
        member("j", "chief", node="a"),
        member(
            "j",
            "worker",
            0,
            node="a",
            labels={"batch.kubernetes.io/job-completion-index": "9" * 30},
        ),
    ]
    (job,) = read(mpi(), pods=strays)
    assert job.instances == ()


@pytest.mark.parametrize(
    ("kind", "roles", "chief", "names"),
    [
        ("pytorch", {"worker": 2}, "j-master-0", ["j-master-0", "j-worker-0"]),
        ("tensorflow", {"ps": 1, "worker": 1}, "j-worker-0", ["j-worker-0", "j-ps-0"]),
        (
            "tensorflow",
            {"worker": 1, "ps": 1, "chief": 1},
            "j-chief-0",
            ["j-chief-0", "j-worker-0", "j-ps-0"],
        ),
    ],
)
def test_chief_comes_first(kind: str, roles: dict[str, int], chief: str, names: list[str]) -> None:
    """The chief, else the first worker; PyTorch's first member is called the master."""
    pods = [member("j", role, index) for role, count in roles.items() for index in range(count)]
    (job,) = read(job_set("j", kind, roles=roles), pods=pods)
    assert job.chief is not None
    assert (job.chief.name, [each.name for each in job.instances]) == (chief, names)


# ---- cards ----


def cards_of(pod: Json, *nodes: Json) -> tuple[float | None, float | None, tuple[CardUse, ...]]:
    """Return what a pod requests and holds."""
    (job,) = read(job_set("j", roles={"worker": 1}), pods=[pod], nodes=list(nodes))
    (instance,) = job.instances
    return instance.requested, instance.allocated, instance.cards


def test_slices_count_as_shares_of_a_card() -> None:
    """4 of 14 units are 0.3 of a card, as arena shows services; three such pods are 0.9."""
    pods = [
        member("j", "worker", index, units(4), node="a", annotations=on_card(0, 4))
        for index in range(3)
    ]
    (job,) = read(job_set("j", roles={"worker": 3}), pods=pods, nodes=[sharing("a")])
    assert (job.requested, job.allocated) == (0.9, 0.9)
    assert [each.cards[0].index for each in job.instances] == [0, 0, 0]


@pytest.mark.parametrize(
    ("limits", "requested"),
    [
        ({}, 0),
        (units(14), 1),
        ({base.NVIDIA_GPU: 2}, 2),
        ({"aliyun.com/gpu": 2}, 2),
        ({ack.CORE: 30, **units(4)}, 0.3),
        ({**units(4), "tencent.com/vcuda-core": 10}, None),
    ],
)
def test_pending_pod_requests_cards_and_holds_none(limits: Json, requested: float | None) -> None:
    """Without a node, the first sharing node's card tells what a unit is."""
    assert cards_of(member("j", "worker", 0, limits), sharing("a")) == (requested, 0, ())


def test_request_is_unknown_when_no_node_shares_cards() -> None:
    """Nothing tells how many units a card has."""
    assert cards_of(member("j", "worker", 0, units(4)), node("a")) == (None, 0, ())
    assert cards_of(member("j", "worker", 0, {base.NVIDIA_GPU: 1}), node("a")) == (1, 0, ())


def test_held_cards_are_unknown_when_nodes_cannot_be_listed() -> None:
    """A user of one namespace may not list nodes, whose cards tell what a unit is."""
    pods = [member("j", "worker", 0, units(4), node="a", annotations=on_card(0, 4))]
    (job,) = read(job_set("j", roles={"worker": 1}), pods=pods, nodes=None)
    assert (job.requested, job.allocated) == (None, None)


WORKERS_OF_TWO = {"worker": {base.NVIDIA_GPU: 2}}


@pytest.mark.parametrize(
    ("root", "pods"),
    [
        pytest.param(mpi(suspend=True, limits=WORKERS_OF_TWO), [], id="queued"),
        pytest.param(
            mpi(limits=WORKERS_OF_TWO),
            [member("j", "worker", 0, {base.NVIDIA_GPU: 2}, node="a")],
            id="one pod is missing",
        ),
        pytest.param(
            mpi(conditions=[condition("Completed")], limits=WORKERS_OF_TWO),
            [member("j", "launcher", node="a", phase="Succeeded")],
            id="ended",
        ),
    ],
)
def test_job_requests_what_its_root_declares_when_pods_do_not_exist(
    root: Json, pods: list[Json]
) -> None:
    """As arena counts it."""
    (job,) = read(root, pods=pods, nodes=[node("a")])
    assert job.requested == 4


def test_declared_request_is_unknown_when_no_node_shares_cards() -> None:
    """Not 0."""
    (job,) = read(mpi(suspend=True, limits={"worker": units(4)}), nodes=[node("a")])
    assert job.requested is None


def test_finished_pod_holds_nothing() -> None:
    """Its request stays on the screen."""
    finished = member(
        "j", "worker", 0, units(4), node="a", phase="Succeeded", annotations=on_card(0, 4)
    )
    assert cards_of(finished, sharing("a")) == (0.3, 0, ())


def test_node_address_is_the_pods_host_when_nodes_cannot_be_listed() -> None:
    """A user may have rights in a namespace alone."""
    pods = [member("j", "launcher", node="a", status={"hostIP": "10.0.0.9"})]
    assert read(mpi(), pods=pods, nodes=None)[0].instances[0].node_address == "10.0.0.9"


# ---- notes, tensorboard ----


@pytest.mark.parametrize(
    ("root", "age_s", "note"),
    [
        (mpi(suspend=True), 300, "its submission was interrupted"),
        (mpi(suspend=True), 5, "it is being submitted"),
        (mpi(suspend=True, annotations={"fenka.io/submitted": "x"}), 300, ""),
        (mpi(suspend=True, labels={QUEUE_NAME: "team"}), 300, ""),
        (mpi(), 300, ""),
    ],
)
def test_note_reports_an_interrupted_submission(root: Json, age_s: float, note: str) -> None:
    """The root object is resumed last; one that Kueue or a user has suspended is complete."""
    (job,) = read(root, now=NOON + age_s)
    assert job.note.startswith(note)
    assert bool(job.note) is bool(note)


def test_why_is_the_schedulers_message_when_a_pod_waits() -> None:
    """For JSON; `fenka why` explains it."""
    pods = [member("j", "worker", 0, status=unschedulable("0/1 nodes are available"))]
    assert read(mpi(), pods=pods)[0].why == "0/1 nodes are available"
    assert (
        read(mpi(conditions=[condition("Failed", 1, "too many restarts")]))[0].why
        == "too many restarts"
    )


def test_job_is_pending_when_its_container_fails_again_and_again() -> None:
    """Kubernetes calls the pod Running; the sentence names the container and its restarts."""
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    status = {
        "phase": "Running",
        "containerStatuses": [{"name": "main", "restartCount": 4, "state": waits}],
    }
    pods = [member("j", "launcher", node="a"), *workers(node="a", status=status)]
    job = read(mpi(), pods=pods)[0]
    assert (job.status, job.why) == (
        "PENDING",
        "container main fails again and again (CrashLoopBackOff, 4 restarts): "
        "`fenka logs` shows its output",
    )


def test_tensorboard_is_a_port_of_a_node_that_is_ready() -> None:
    """A NodePort is open on all nodes."""
    service = {
        "metadata": {"name": "j-tensorboard", "namespace": "default", "labels": {JOB: "j"}},
        "spec": {"type": "NodePort", "ports": [{"port": 6006, "nodePort": 31234}]},
    }
    nodes = [node("a", ready="False", address="10.0.0.1"), node("b", address="10.0.0.2")]
    assert read(mpi(), nodes=nodes, services=[service])[0].tensorboard == "http://10.0.0.2:31234"
    assert read(mpi(), nodes=[], services=[service])[0].tensorboard == ""


def test_jobs_are_sorted_by_age() -> None:
    """The newest comes first."""
    roots = [
        job_set(name, roles=MPI, created=moment(at)) for name, at in (("a", 0), ("b", 60), ("c", 0))
    ]
    assert [job.name for job in read(*roots)] == ["b", "a", "c"]


# ---- other operators' jobs ----


def foreign_pod(name: str, labels: dict[str, str], **given: Any) -> Json:
    """Return a pod of another operator."""
    made = member("ignored", "ignored", 0, name=name, **given)
    made["metadata"]["labels"] = labels
    return made


def launched(job: str) -> list[Json]:
    """Return the pods of an MPIJob of arena's operator."""
    labels = {"mpi_job_name": job, "release": job}
    return [
        foreign_pod(f"{job}-worker-{index}", {**labels, "mpi_role_type": "worker"}, node="a")
        for index in (0, 1)
    ] + [foreign_pod(f"{job}-launcher-lpfvg", {**labels, "mpi_role_type": "launcher"}, node="a")]


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (foreign_job("m", "MPIJob", None, status={"launcherStatus": "Active"}), "RUNNING"),
        (foreign_job("m", "MPIJob", None, status={"launcherStatus": "Succeeded"}), "SUCCEEDED"),
        (foreign_job("m", "MPIJob", None, status={"launcherStatus": "Failed"}), "FAILED"),
        (foreign_job("m", "MPIJob", [condition("Running")]), "RUNNING"),
        (foreign_job("m", "TFJob", [condition("Running"), condition("Succeeded")]), "SUCCEEDED"),
        (foreign_job("m", "PyTorchJob", [condition("Failed")]), "FAILED"),
        (foreign_job("m", "TrainJob", [condition("Suspended")]), "QUEUING"),
        (foreign_job("m", "TFJob", [condition("Queuing")]), "RUNNING"),
        (foreign_job("m", "TrainJob", [condition("Complete")]), "SUCCEEDED"),
    ],
)
def test_foreign_status_follows_conditions_or_the_launcher(job: Json, status: JobStatus) -> None:
    """MPIJob v1alpha1 has launcherStatus, all others conditions."""
    (shown,) = read(foreign=[job], pods=launched("m"))
    assert (shown.status, shown.trainer, shown.foreign) == (status, job["kind"].lower(), True)


def test_foreign_job_is_queuing_when_kube_queue_holds_it() -> None:
    """It has no pods then."""
    job = foreign_job("m", "TFJob", [condition("Created"), condition("Queuing")])
    assert read(foreign=[job])[0].status == "QUEUING"


def test_foreign_worker_is_no_chief_when_the_launcher_does_not_exist_yet() -> None:
    """The launcher is made when the workers run."""
    job = foreign_job("m", "MPIJob", [condition("Created")])
    (shown,) = read(foreign=[job], pods=launched("m")[:1])
    assert shown.chief is None


@pytest.mark.parametrize(
    ("declared", "chief"), [({"Worker": 2}, True), ({"Worker": 2, "Chief": 1}, False)]
)
def test_foreign_worker_is_chief_when_the_job_declares_no_other(
    declared: dict[str, int], chief: bool
) -> None:
    """Whether or not the chief's pod exists."""
    specs = {role: {"replicas": count} for role, count in declared.items()}
    labels = {"training.kubeflow.org/job-name": "t", "training.kubeflow.org/replica-type": "worker"}
    job = foreign_job("t", "TFJob", [], spec={"tfReplicaSpecs": specs})
    (shown,) = read(foreign=[job], pods=[foreign_pod("t-worker-0", labels)])
    assert (shown.chief is not None) is chief


def with_cards(count: int, replicas: int | None) -> Json:
    """Return a role's replicas that request cards each."""
    containers = [{"name": "c", "resources": {"limits": {base.NVIDIA_GPU: count}}}]
    template = {"metadata": {"creationTimestamp": None}, "spec": {"containers": containers}}
    return {"replicas": replicas, "template": template}


@pytest.mark.parametrize(
    ("kind", "spec", "requested"),
    [
        (
            "MPIJob",
            {"mpiReplicaSpecs": {"Launcher": with_cards(0, 1), "Worker": with_cards(1, 2)}},
            2,
        ),
        ("MPIJob", with_cards(2, 2), 4),
        ("PyTorchJob", {"pytorchReplicaSpecs": {"Master": with_cards(1, None)}}, 1),
        ("TFJob", {"tfReplicaSpecs": {"PS": with_cards(0, 1), "Worker": with_cards(1, 3)}}, 3),
        ("TFJob", {"tfReplicaSpecs": {"Worker": 7}}, 0),
        ("TFJob", None, 0),
    ],
)
def test_foreign_job_requests_what_its_spec_declares(
    kind: str, spec: Json | None, requested: float
) -> None:
    """A spec that cannot be read declares nothing, and the job is shown all the same."""
    (job,) = read(foreign=[foreign_job("m", kind, [], spec=spec)], nodes=[node("a")])
    assert job.requested == requested


def test_foreign_job_ended_with_its_last_container_when_it_has_no_completion_time() -> None:
    """MPIJob v1alpha1 may end without one."""
    job = foreign_job("m", "MPIJob", None, status={"launcherStatus": "Succeeded"})
    ended = {"name": "c", "state": {"terminated": {"exitCode": 0, "finishedAt": moment(90)}}}
    pods = launched("m")
    pods[2]["status"] |= {"phase": "Succeeded", "containerStatuses": [ended]}
    (shown,) = read(foreign=[job], pods=pods)
    assert shown.ended == NOON + 90
    assert shown.duration(NOON + 600) == 90


def test_duration_is_unknown_when_nothing_tells_the_end() -> None:
    """It does not grow."""
    job = foreign_job("m", "MPIJob", None, status={"launcherStatus": "Succeeded"})
    (shown,) = read(foreign=[job])
    assert (shown.ended, shown.duration(NOON + 600)) == (None, None)


@pytest.mark.parametrize(
    ("name", "service", "url"),
    [
        (
            "m",
            {"spec": {"type": "NodePort", "ports": [{"port": 6006, "nodePort": 31234}]}},
            "http://10.0.0.1:31234",
        ),
        (
            "m",
            {
                "spec": {"type": "LoadBalancer", "ports": [{"port": 6006, "nodePort": 31234}]},
                "status": {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}},
            },
            "http://1.2.3.4:6006",
        ),
        ("m", {"spec": {"type": "ClusterIP", "ports": [{"port": 6006}]}}, ""),
        ("other", {"spec": {"type": "NodePort", "ports": [{"port": 6006, "nodePort": 31234}]}}, ""),
    ],
)
def test_foreign_tensorboard_is_that_of_arena(name: str, service: Json, url: str) -> None:
    """Its Service has the job's name in label release."""
    labels = {"release": name, "role": "tensorboard"}
    service["metadata"] = {"name": "x", "namespace": "default", "labels": labels}
    job = foreign_job("m", "MPIJob", [condition("Running")])
    nodes = [node("a", address="10.0.0.1")]
    (shown,) = read(foreign=[job], nodes=nodes, tensorboards=[service])
    assert shown.tensorboard == url


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, "Evicted"),
        ({"reason": "Evicted"}, "Evicted"),
        ({}, "Error"),
    ],
)
def test_evicted_instance_is_told_from_one_that_failed(status: Json, word: str) -> None:
    """The program of both has ended with an error."""
    ended = {"name": "c", "state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
    pods = [
        member(
            "j",
            "worker",
            0,
            node="a",
            phase="Failed",
            status={**status, "containerStatuses": [ended]},
        )
    ]
    assert read(mpi(), pods=pods)[0].instances[0].status == word


def test_foreign_job_is_pending_when_a_pod_is() -> None:
    """As arena has it, whatever the operator says."""
    waiting = foreign_pod("m-worker-9", {"mpi_job_name": "m", "mpi_role_type": "worker"})
    job = foreign_job("m", "MPIJob", [condition("Running")])
    assert read(foreign=[job], pods=[*launched("m"), waiting])[0].status == "PENDING"
    assert read(foreign=[job], pods=[])[0].status == "PENDING"


def test_foreign_instances_are_called_like_their_pods() -> None:
    """The launcher is the chief."""
    (job,) = read(foreign=[foreign_job("m", "MPIJob", [condition("Running")])], pods=launched("m"))
    assert [(each.name, each.chief) for each in job.instances] == [
        ("m-launcher-lpfvg", True),
        ("m-worker-0", False),
        ("m-worker-1", False),
    ]


def test_foreign_pods_are_found_by_any_operators_labels() -> None:
    """Kubeflow's training operator, JobSet under a TrainJob, and arena's label."""
    pods = [
        foreign_pod(
            "p",
            {
                "training.kubeflow.org/job-name": "t",
                "training.kubeflow.org/replica-type": "master",
                "training.kubeflow.org/replica-index": "0",
            },
        ),
        foreign_pod("q", {"jobset.sigs.k8s.io/jobset-name": "u", "release": "other"}),
        foreign_pod("r", {"release": "t"}),
        foreign_pod("s", {"release": "nobody"}),
    ]
    jobs = read(
        foreign=[foreign_job("t", "PyTorchJob", []), foreign_job("u", "TrainJob", [])], pods=pods
    )
    names = {job.name: [each.name for each in job.instances] for job in jobs}
    assert names == {"t": ["p", "r"], "u": ["q"]}


# ---- whatever tenants write ----


LABELS = st.dictionaries(
    st.sampled_from(
        [
            JOB,
            "fenka.io/role",
            "batch.kubernetes.io/job-completion-index",
            "jobset.sigs.k8s.io/restart-attempt",
            "release",
            "mpi_job_name",
            "training.kubeflow.org/replica-index",
        ]
    ),
    st.sampled_from(["j", "m", "worker", "launcher", "0", "1", "-1", "٣", "1" * 40, ""])
    | st.text(max_size=8),
)


@given(
    st.lists(st.tuples(LABELS, st.sampled_from(["Pending", "Running", "Failed", ""])), max_size=6)
)
def test_labels_of_tenants_never_break_a_screen(pods: list[tuple[dict[str, str], str]]) -> None:
    """Each instance is of a declared role and index, and at most one of each."""
    made = []
    for number, (labels, phase) in enumerate(pods):
        made.append(foreign_pod(f"p{number}", labels, phase=phase))
    jobs = read(mpi(), foreign=[foreign_job("m", "MPIJob", [])], pods=made)
    own = next(job for job in jobs if not job.foreign)
    places = [(each.role, each.index) for each in own.instances]
    assert len(places) == len(set(places))
    assert set(places) <= {("launcher", 0), ("worker", 0), ("worker", 1)}
