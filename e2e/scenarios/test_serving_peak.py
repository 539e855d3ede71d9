"""Serve a peak beside a training that backfills: it gives its cards back, and goes on afterwards."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.backfilling import MEMBER, attempts, backfill, steps
from e2e.scenarios.installation import Installation
from e2e.scenarios.jobs import Jobs
from e2e.scenarios.services import Services
from e2e.scenarios.serving.load import Request, quantile, read, windows
from e2e.scenarios.serving.observe import recorded

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

REPLICA = 4
PHASES = ((10, 30), (200, 90), (10, 30))
"""Requests per second, and seconds."""
WARM_S, WINDOW_S = 10, 5


def p95(requests: Sequence[Request]) -> float:
    """Return the latency that 95 % of the requests do not exceed."""
    return quantile([request.latency_s for request in requests], 0.95)


def test_peak_evicts_the_gang_which_goes_on_afterwards(
    jobs: Jobs, shared: Installation, tmp_path: Path
) -> None:
    """No request fails, and in the peak latency comes back to less than three times that before it.

    A replica has 30 % of a card's time, so one serves 150 requests of 2 ms a second. The third replica
    needs the memory of a member of the training. serving/plot.py draws the record `serving.json` in the
    cluster's state.
    """
    cluster, namespace = shared.cluster, jobs.namespace
    services = Services(shared, namespace)
    nodes = [node.name for node in cluster.nodes]
    file = tmp_path / "requests"
    with recorded(cluster, namespace) as record, jobs.claim("steps", *nodes) as folder:
        options = [
            "--gpu-mem=4",
            "--gpu-core=30",
            "--replicas=1..3",
            "--target=1",
            "--down-after=30s",
        ]
        services.serve("v1", *options, cost_us=2000)
        services.wait_for_answers()
        backfill(jobs, folder)
        members = {pod.uid for pod in record.pods.values() if pod.units == MEMBER}
        with services.load(file, *(f"{rate}x{seconds}" for rate, seconds in PHASES)):
            pass
        services.wait_for_replicas(1)
        wait_until("the next attempt", lambda: min(attempts(folder)) >= 1, 180)
        goal = 2 * len(steps(folder, 0))
        wait_until("steps of the next attempt", lambda: len(steps(folder, 0)) >= goal, 180)
        trained = [steps(folder, rank) for rank in (0, 1)]
        Path(folder, "end").touch()
        jobs.wait_for("gang", "SUCCEEDED")
        assert not members & record.pods.keys()
    requests = read(file)
    document = {
        "phases": PHASES,
        "requests": [[each.at, each.latency_s, each.status, each.sent_late_s] for each in requests],
        "replicas": record.replicas(),
        "steps": trained,
    }
    (cluster.state / "serving.json").write_text(json.dumps(document))

    assert [request for request in requests if not request.right] == []
    assert record.overcommitted() == record.violations == []
    assert max(number for _, number in record.replicas()) == 3
    for member in trained:
        numbers = [each["step"] for each in member]
        assert numbers == list(range(1, len(numbers) + 1))
    check_latency(requests)


def check_latency(requests: Sequence[Request]) -> None:
    """Check that the service is again as fast as when idle, within a factor of 3, at some time of the peak.

    Without more replicas the requests that wait would only become more. A single time is enough, since other
    programs on this machine slow both.
    """
    begin, (_, idle_s), (_, peak_s) = requests[0].at, *PHASES[:2]
    idle = [each for each in requests if WARM_S <= each.at - begin < idle_s]
    late = [each for each in requests if idle_s + WARM_S <= each.at - begin < idle_s + peak_s]
    by_window = [p95(group) for _, group in windows(late, WINDOW_S)]
    assert min(by_window) < 3 * p95(idle), (p95(idle), by_window)
