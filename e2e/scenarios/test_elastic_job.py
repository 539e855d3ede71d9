"""A training brings its nodes, and they leave when it has ended (docs/do/autoscale.md)."""

import pytest

from e2e.cluster import wait_until
from e2e.repository import Repository
from e2e.scenarios.cloud import Offer
from e2e.scenarios.elastic import Elastic
from e2e.scenarios.installation import WHOLE, Installation, deployment
from e2e.scenarios.jobs import Jobs, program
from e2e.scenarios.test_jobs import TRAIN, pod_names, rows

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

WORKERS = ["mpi-dist-worker-0", "mpi-dist-worker-1"]
IDLE = {"delay": "20s", "cooldown": "1s"}


def test_job_brings_its_nodes_and_they_leave_when_it_has_ended(
    jobs: Jobs, elastic: Elastic
) -> None:
    """Follow the article: 0/0, PENDING with N/A, one order of two, 2/2, SUCCEEDED, 0/0."""
    installation = jobs.installation
    repository = Repository(installation.cluster, jobs.namespace)
    repository.commit(program("sum_ranks.py"))
    whole = Offer("t4", mode="gpushare=false", scaled=True, more={"max": 4})
    with elastic.autoscaler([whole], scaleIn=IDLE):
        assert "0/0 (0%)" in installation.fenka("top", "node")
        options = ["--gpus=1", "--workers=2", "--env=WAIT=1"]
        options += ["--sync-mode=git", f"--sync-source={repository.public_url}"]
        jobs.submit("mpi", "mpi-dist", *options, command=[TRAIN])
        pending = [["mpi-dist", "PENDING", "MPIJOB", worker, "N/A"] for worker in WORKERS]

        def is_pending() -> bool:
            table = rows(jobs, "mpi-dist")
            assert table[0] == ["STATUS:", "PENDING"], table
            assert table[4:] == pending, table
            return True

        wait_until("the article's first picture", is_pending)
        wait_until("an order", elastic.orders)
        (order,) = elastic.orders().values()
        assert [order["group"], len(order["slots"])] == ["t4", 2]

        jobs.wait_for("mpi-dist", "RUNNING", seconds=240)
        table = rows(jobs, "mpi-dist")
        assert [row[3] for row in table[4:]] == ["mpi-dist-launcher-0", *WORKERS]
        bought = {elastic.cloud.address_of(name) for name in elastic.cloud.machines}
        assert {row[4] for row in table[5:]} == bought
        assert "2/2 (100%)" in installation.fenka("top", "node")
        assert [(call.action, call.amount) for call in elastic.cloud.launches()] == [
            ("ScaleWithAdjustment", 2)
        ]

        jobs.let_go(next(name for name in pod_names(jobs, "worker") if "-worker-0-0" in name))
        jobs.wait_for("mpi-dist", "SUCCEEDED")
        wait_until("idle nodes", lambda: _idle(installation))
        # What comes within the delay uses them again.
        installation.cluster.apply(deployment("again", WHOLE, 1))
        (pod,) = installation.wait_for_running("again", 1)
        assert pod["spec"]["nodeName"] in elastic.nodes()
        installation.cluster.kubectl("delete", "deployment", "again", "--now")
        assert len(elastic.cloud.launches()) == 1
        elastic.wait_for_no_nodes()
        assert "0/0 (0%)" in installation.fenka("top", "node")
        assert rows(jobs, "mpi-dist")[0] == ["STATUS:", "SUCCEEDED"]
        jobs.fenka("delete", "mpi-dist")


def _idle(installation: Installation) -> bool:
    shown = installation.fenka("nodes").splitlines()[1:]
    lines = [line for line in shown if line.split()[1] != "-"]  # those of a group
    assert len(lines) == 2, lines
    assert all("idle for" in line and "ends in" in line for line in lines), lines
    return True
