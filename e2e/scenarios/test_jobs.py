"""Submit training jobs as users do: whole cards and slices, a failing rank, an interrupted submission.

Follow their logs, run commands in their instances, and open their TensorBoard.
"""

import json
import os
import pty
import subprocess
import termios
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.images import MPI_SSH, TRAINING
from e2e.repository import Repository
from e2e.scenarios.containers import wait_for_no_leases
from e2e.scenarios.installation import FENKA, WHOLE, Installation, deployment
from e2e.scenarios.jobs import CODE, Jobs, program

# A job's pods start one after another, and each of its steps takes seconds.
pytestmark = pytest.mark.timeout(600)

TRAIN = "mpirun python3 code/project/sum_ranks.py"


@pytest.fixture
def whole_cards(installation: Installation) -> Iterator[list[str]]:
    """Let both nodes offer their card as a whole, and return their addresses."""
    nodes = [node.name for node in installation.cluster.nodes]
    for node in nodes:
        installation.label(node, "cgpu-", "gpushare=false")
    for node in nodes:
        installation.wait_for_allocatable(node, WHOLE, 1)
    yield [node.address for node in installation.cluster.nodes]
    installation.cluster.kubectl("delete", "deployment", "--all", "--now")
    for node in nodes:
        installation.label(node, "gpushare-")
    for node in nodes:
        installation.wait_for_allocatable(node, WHOLE, 0)


def rows(jobs: Jobs, name: str) -> list[list[str]]:
    """Return the cells of `fenka get`: the head's lines, then the instances, all without ages."""
    table = jobs.table("get", name)
    # NAME STATUS TRAINER AGE INSTANCE NODE
    return [[*line[:3], *line[4:]] if len(line) == 6 else line for line in table if line]


@pytest.mark.versions
@pytest.mark.since("1.33", "an API server that rejects a rule in the chart's JobSet")
def test_training_of_two_cards_runs_the_submitted_commit_when_cards_are_free(
    jobs: Jobs, whole_cards: list[str]
) -> None:
    """Follow the article: PENDING without nodes, RUNNING on both, SUCCEEDED with the launcher alone."""
    installation, namespace = jobs.installation, jobs.namespace
    repository = Repository(installation.cluster, namespace)
    repository.commit({"sum_ranks.py": "raise SystemExit('not this branch')\n"})
    commit = repository.commit(program("sum_ranks.py"), branch="tuned")
    installation.cluster.apply(deployment("holder", WHOLE, 1, replicas=2))
    installation.wait_for_running("holder", 2)

    options = ["--gpus=1", "--workers=2", "--env=GIT_SYNC_BRANCH=tuned", "--env=WAIT=1"]
    options += ["--sync-mode=git", f"--sync-source={repository.public_url}"]
    printed = jobs.submit("mpijob", "mpi-dist", *options, command=[TRAIN])
    assert "The Job mpi-dist has been submitted successfully" in printed
    head = ["NAME", "STATUS", "TRAINER", "INSTANCE", "NODE"]
    workers = ["mpi-dist-worker-0", "mpi-dist-worker-1"]
    pending = [["mpi-dist", "PENDING", "MPIJOB", worker, "N/A"] for worker in workers]

    def waits() -> bool:
        table = rows(jobs, "mpi-dist")
        assert table[0] == ["STATUS:", "PENDING"], table
        assert table[3:] == [head, *pending], table
        return True

    wait_until("the article's first picture", waits)
    # The job runs the commit of its submission, whatever is pushed later.
    repository.commit({"sum_ranks.py": "raise SystemExit('pushed later')\n"}, branch="tuned")

    installation.cluster.kubectl("delete", "deployment", "holder", "--now")
    jobs.wait_for("mpi-dist", "RUNNING")
    table = rows(jobs, "mpi-dist")
    assert table[0] == ["STATUS:", "RUNNING"]
    assert [row[:4] for row in table[4:]] == [
        ["mpi-dist", "RUNNING", "MPIJOB", instance]
        for instance in ("mpi-dist-launcher-0", *workers)
    ]
    assert {row[4] for row in table[5:]} == set(whole_cards)
    assert "2/2 (100%)" in installation.fenka("top", "node")
    assert jobs.table("top", "job")[1][:4] == ["mpi-dist", "2", "2", "RUNNING"]

    pod = next(name for name in pod_names(jobs, "worker") if "-worker-0-0" in name)
    jobs.let_go(pod)
    jobs.wait_for("mpi-dist", "SUCCEEDED")
    assert [row[:4] for row in rows(jobs, "mpi-dist")[4:]] == [
        ["mpi-dist", "SUCCEEDED", "MPIJOB", "mpi-dist-launcher-0"]
    ]
    lines = jobs.lines("mpi-dist")
    assert [line["sum"] for line in lines] == ["3", "3"]
    assert [line["host"] for line in lines] == ["mpi-dist-worker-0-0", "mpi-dist-worker-0-1"]
    assert {line["commit"] for line in lines} == {commit}
    assert {line["mib"] for line in lines} == {"15079"}
    assert "0/2 (0%)" in installation.fenka("top", "node")
    jobs.fenka("delete", "mpi-dist")
    wait_until("nothing of the job is left", lambda: not jobs.objects())


def pod_names(jobs: Jobs, role: str = "") -> list[str]:
    """Return the names of the pods of all jobs, or those of a role."""
    return sorted(pod["metadata"]["name"] for pod in jobs.pods(role).values())


@pytest.fixture
def code(jobs: Jobs) -> list[str]:
    """Return the options for the code of a training that is served in the namespace."""
    repository = Repository(jobs.installation.cluster, jobs.namespace)
    repository.commit(program("sum_ranks.py"))
    return ["--sync-mode=git", f"--sync-source={repository.url}"]


def test_workers_of_slices_share_one_card_and_see_their_limit(
    jobs: Jobs, code: list[str], node: str
) -> None:
    """Three of 4 units fit on one T4: each sees 4308 MiB and cannot allocate more."""
    options = ("--workers=3", "--gpu-mem=4", "--env=WAIT=1", *code)
    jobs.submit("mpijob", "slices", *options, command=[TRAIN])
    jobs.wait_for("slices", "RUNNING")
    assert {row[-1] for row in rows(jobs, "slices")[5:]} == {
        jobs.installation.cluster.node(node).address
    }
    assert "0.9" in jobs.fenka("top", "job").split()
    jobs.let_go(next(name for name in pod_names(jobs, "worker") if "-worker-0-0" in name))
    jobs.wait_for("slices", "SUCCEEDED")
    assert [
        (line["rank"], line["sum"], line["mib"], line["within"], line["beyond"])
        for line in jobs.lines("slices")
    ] == [(str(rank), "6", "4308", "allocated", "refused") for rank in range(3)]


@pytest.mark.full
def test_all_pods_are_new_once_when_a_rank_fails_with_one_retry(
    jobs: Jobs, code: list[str], node: str
) -> None:
    """The second failure ends the job; no slice is held afterwards."""
    options = ("--workers=2", "--gpu-mem=4", "--retry=1", "--env=FAIL=1", *code)
    jobs.submit("mpijob", "failing", *options, command=[TRAIN])
    attempts: dict[str, str] = {}

    def ended() -> bool:
        for uid, pod in jobs.pods().items():
            attempts[uid] = pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"]
        record = jobs.record("failing")
        assert record["status"] == "FAILED", (record["status"], jobs.explain())
        return True

    wait_until("the job's failure", ended, 180)
    assert sorted(attempts.values()) == ["0"] * 3 + ["1"] * 3
    wait_for_no_leases(jobs.installation, node)


def test_ranks_start_over_ssh_when_the_image_has_no_python(jobs: Jobs) -> None:
    """The same agents of the job then run sshd and ssh, with keys that only this job has."""
    rank = 'echo "rank=$OMPI_COMM_WORLD_RANK host=$(hostname)"'
    wait = '[ "$OMPI_COMM_WORLD_RANK" != 0 ] || until [ -e /tmp/go ]; do sleep 0.1; done'
    train = ["mpirun", "sh", "-c", f"{wait}; {rank}; ! command -v python3"]
    jobs.submit("mpijob", "over-ssh", "--workers=2", command=train, image=MPI_SSH)
    jobs.wait_for("over-ssh", "RUNNING")
    logs = [("logs", "over-ssh", "-i", f"over-ssh-worker-{index}") for index in range(2)]
    accepted = "Accepted publickey for root"
    wait_until("mpirun's daemons", lambda: all(accepted in jobs.fenka(*log) for log in logs))
    jobs.let_go(next(name for name in pod_names(jobs, "worker") if "-worker-0-0" in name))
    jobs.wait_for("over-ssh", "SUCCEEDED")
    assert jobs.lines("over-ssh") == [
        {"rank": str(number), "host": f"over-ssh-worker-0-{number}"} for number in range(2)
    ]


# Accepts connections and never answers.
SILENT = """
import socket, time
listener = socket.create_server(("127.0.0.1", 9444), backlog=64)
print("listening", flush=True)
time.sleep(1000)
"""
WEBHOOK = """
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: silent}
webhooks:
- name: silent.fenka.test
  admissionReviewVersions: [v1]
  sideEffects: None
  timeoutSeconds: 30
  clientConfig: {url: "https://127.0.0.1:9444/"}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps, secrets]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}}
  matchConditions: [{name: not-a-dry-run, expression: "!(has(request.dryRun) && request.dryRun)"}]
"""


@contextmanager
def dependents_that_are_never_created(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Let the API server not answer while ConfigMaps and Secrets are created in a namespace."""
    command = cluster.command("python3", "-c", SILENT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as silent:
        try:
            assert silent.stdout
            assert silent.stdout.readline() == "listening\n"
            text = WEBHOOK.replace("NAMESPACE", namespace)
            cluster.kubectl("apply", "-f", "-", stdin=text)
            yield
        finally:
            cluster.kubectl("delete", "validatingwebhookconfiguration", "silent")
            silent.kill()


@pytest.mark.full
def test_nothing_runs_and_delete_leaves_nothing_when_the_client_is_killed(
    jobs: Jobs, code: list[str]
) -> None:
    """The client dies after the root object exists: `get` reports it, `delete` removes all of it."""
    cluster, namespace = jobs.installation.cluster, jobs.namespace
    with dependents_that_are_never_created(cluster, namespace):
        argv = jobs.submission(
            "mpijob", "halfway", "--workers=2", "--gpu-mem=4", *code, command=[TRAIN]
        )
        with jobs.client(*argv):
            wait_until("the root object", lambda: cluster.get("jobset", "halfway", namespace))
    assert cluster.get("jobset", "halfway", namespace)["spec"]["suspend"] is True
    assert jobs.record("halfway")["status"] == "QUEUING"
    # A submission that takes long is not yet an interrupted one.
    interrupted = "its submission was interrupted, and it will not start"
    wait_until("the report", lambda: interrupted in jobs.fenka("get", "halfway"), 180)
    assert not jobs.pods()
    jobs.fenka("delete", "halfway")
    wait_until("nothing of the job is left", lambda: not jobs.objects())
    with pytest.raises(ClusterError, match="job or service halfway not found in namespace"):
        jobs.fenka("get", "halfway")


def steps_by_attempt(log: Path) -> dict[str, list[int]]:
    """Return the steps in a log of talking.py, by rank and attempt."""
    steps = defaultdict(list)
    for line in log.read_text().splitlines():
        if line.startswith("rank="):
            who, _, step = line.partition(" step=")
            steps[who].append(int(step))
    return steps


def end_attempt(jobs: Jobs, attempt: int, logs: list[Path]) -> None:
    """Let the processes of an attempt fail when all logs have its first line."""
    first = f"attempt={attempt} step=0\n"
    wait_until(first, lambda: all(first in log.read_text() for log in logs))
    for pod in pod_names(jobs):
        jobs.let_go(pod)


@pytest.mark.full
def test_followed_logs_have_each_line_once_until_the_end_of_a_job_that_restarts(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The API server is away meanwhile. A submission that is followed ends with the job's code."""
    command = ["python3", "code/talking.py"]
    options = ("--workers=2", "--retry=1", "--follow", CODE)
    submission = jobs.submission("pytorchjob", "talking", *options, command=command)
    of_worker = ("talking", "-n", jobs.namespace, "-i", "talking-worker-0")
    logs = [tmp_path / "chief", tmp_path / "worker"]
    with (
        logs[0].open("w") as chief,
        logs[1].open("w") as worker,
        jobs.client(*submission, stdout=chief) as submitted,
    ):
        jobs.wait_for("talking", "RUNNING")
        with jobs.client(*FENKA, "logs", "-f", *of_worker, stdout=worker) as followed:
            wait_until("lines of both", lambda: all("step=1\n" in log.read_text() for log in logs))
            jobs.installation.cluster.restart_apiserver()
            sizes = {log: log.stat().st_size for log in logs}
            wait_until(
                "lines after the outage",
                lambda: all(log.stat().st_size > size for log, size in sizes.items()),
            )
            end_attempt(jobs, 0, logs)
            end_attempt(jobs, 1, logs)
            assert submitted.wait() == 3
            assert followed.wait() == 0
    assert jobs.record("talking")["status"] == "FAILED"
    for rank, log in enumerate(logs):
        steps = steps_by_attempt(log)
        assert list(steps) == [f"rank={rank} attempt={attempt}" for attempt in range(2)]
        for each in steps.values():
            assert each == list(range(len(each)))


def test_attached_command_has_the_clients_streams_and_its_exit_code_is_the_clients(
    jobs: Jobs,
) -> None:
    """With a terminal it has one of the same size; without one it has both outputs apart."""
    jobs.submit("pytorchjob", "talking", CODE, command=["python3", "code/talking.py"])
    jobs.wait_for("talking", "RUNNING")
    attach = (*FENKA, "attach", "talking", "-n", jobs.namespace)
    script = "cat; echo $FENKA_JOB >&2; exit 5"
    pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    with jobs.client(*attach, "--", "sh", "-c", script, **pipes) as piped:
        assert piped.communicate("typed\n") == ("typed\n", "talking\n")
        assert piped.returncode == 5

    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (43, 77))
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with jobs.client(*attach, "-i", "talking-master-0", **streams) as shell:
        os.write(controller, b"until stty size | grep -q '43 77'; do sleep 0.1; done; exit 4\n")
        assert shell.wait() == 4
    os.close(controller)
    os.close(terminal)

    with pytest.raises(ClusterError, match="has no instance nobody: its instances are"):
        jobs.fenka("logs", "talking", "-i", "nobody")


def test_tensorboard_shows_the_logs_on_a_claim_until_the_job_is_deleted(
    jobs: Jobs, node: str
) -> None:
    """Its address is in `fenka get`, and answers through the Service, also after the job's end."""
    cluster = jobs.installation.cluster
    options = ["--data=results:/data", "--logdir=/data/logs", "--tensorboard"]
    options += [f"--tensorboard-image={TRAINING}", CODE]
    with jobs.claim("results", node):
        jobs.submit("pytorchjob", "losing", *options, command=["python3", "code/losing.py"])
        url = jobs.wait_for("losing", "SUCCEEDED")["tensorboard"]
        assert f"{url}   \n" in jobs.fenka("get", "losing")
        wait_until("the page", lambda: "<title>TensorBoard</title>" in cluster.fetch(url))
        scalars = f"{url}/data/plugin/scalars/scalars?tag=loss&run=."

        def losses() -> bool:
            points = json.loads(cluster.fetch(scalars))
            assert [point[2] for point in points] == pytest.approx([1, 1 / 2, 1 / 3]), points
            return True

        wait_until("the losses", losses)
        jobs.fenka("delete", "losing")
        wait_until("nothing of the job is left", lambda: not jobs.objects())
        with pytest.raises(ClusterError, match="refused"):
            cluster.fetch(url)
