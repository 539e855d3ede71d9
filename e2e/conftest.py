"""Provide one cluster for all tests of a session.

FENKA_E2E_KEEP=1 leaves the cluster running for inspection. FENKA_E2E_TIER=full also runs the scenarios that
take minutes each and are marked `full`.
"""

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import engines
from e2e.cluster import STATE, Cluster
from e2e.images import FULL, image_store
from e2e.machine import ClusterError

HERE = Path(__file__).parent
# Starting the cluster counts towards the time of the first test.
SECONDS = 300
SHOWN_LINES = 40
"""Of a failure, when it happens. All of it is in the summary."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set a longer timeout for these tests, and skip those marked `full` unless FENKA_E2E_TIER=full."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS))
        if item.get_closest_marker("full") and not FULL:
            item.add_marker(
                pytest.mark.skip(reason="takes minutes: set FENKA_E2E_TIER=full to run it")
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print each failure at once: a run that is cut off would show none of them."""
    report = yield
    if report.failed:
        terminal = item.config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"{time.strftime('%T')} {report.nodeid}: {report.when} failed")
        for title, text in [("", report.longreprtext), *report.sections]:
            terminal.write_line(title)
            terminal.write_line("\n".join(text.splitlines()[-SHOWN_LINES:]))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Provide two nodes, sd-cluster-04 and sd-cluster-05, that have every image of e2e.images.

    The tests share the cluster, so each removes what it creates; the fixture `namespace` removes its pods.
    """
    try:
        Cluster.require()
    except ClusterError as error:
        pytest.skip(str(error))
    keep = bool(os.environ.get("FENKA_E2E_KEEP"))
    state = Path(os.environ.get("FENKA_E2E_STATE") or STATE)
    cluster = Cluster(state, owner=None if keep else os.getpid(), progress=print)
    try:
        cluster.up(image_store())
        yield cluster
    finally:
        if not keep:
            cluster.down()


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Provide a namespace for one test, and delete it with its contents afterwards."""
    with cluster.namespace(request.node.name) as name:
        yield name


@pytest.fixture(scope="module")
def keda(cluster: Cluster) -> Iterator[None]:
    """Let KEDA run for a module's tests, which must be marked `full`.

    It owns the API external.metrics.k8s.io meanwhile.
    """
    with engines.keda(cluster):
        yield


@pytest.fixture(scope="module")
def gateway_api(cluster: Cluster) -> Iterator[engines.GatewayApi]:
    """Let a Gateway run for a module's tests, which must be marked `full`."""
    with engines.gateway_api(cluster) as gateway:
        yield gateway
