"""Provide one cluster for all tests of a session.

FENKA_E2E_KEEP=1 leaves the cluster running for inspection. FENKA_E2E_TIER=full also runs the scenarios that
take minutes each and are marked `full`. FENKA_E2E_KUBERNETES=1.33 runs another Kubernetes; the tests that it
cannot pass are marked `since`. FENKA_E2E_VIRTUAL=systemd makes the second node a virtual machine
(virtual_node.py). FENKA_E2E_RECORD=1 records the run (recording.py).
"""

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import engines
from e2e.cluster import STATE, Cluster
from e2e.container_machine import image_archive
from e2e.images import FULL, image_store
from e2e.machine import SLOWER, VIRTUAL, ClusterError
from e2e.programs import minor
from e2e.recording import Recorder
from e2e.virtual_node import VirtualNode

HERE = Path(__file__).parent
# Starting the cluster counts towards the time of the first test.
SECONDS = 300
SHOWN_LINES = 40
"""Of a failure, when it happens. All of it is in the summary."""


def pytest_configure(config: pytest.Config) -> None:
    """Record the run if this is asked for."""
    if os.environ.get("FENKA_E2E_RECORD"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set a longer timeout for these tests, and skip those marked `full` unless FENKA_E2E_TIER=full.

    On another Kubernetes than the cluster's own, those marked `versions` run, too. Those marked `since` are
    skipped where the version is older.
    """
    other = os.environ.get("FENKA_E2E_KUBERNETES") or os.environ.get("FENKA_E2E_CONTAINERD")
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS * SLOWER))
        on_this = other and item.get_closest_marker("versions")
        if item.get_closest_marker("full") and not FULL and not on_this:
            item.add_marker(
                pytest.mark.skip(reason="takes minutes: set FENKA_E2E_TIER=full to run it")
            )
        since = item.get_closest_marker("since")
        if since and minor() < int(since.args[0].removeprefix("1.")):
            reason = f"Kubernetes 1.{minor()} has {since.args[1]}"
            item.add_marker(pytest.mark.skip(reason=reason))


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
    if VIRTUAL:
        cluster.nodes[1] = VirtualNode(cluster, cluster.layout.nodes[1], 1, kind=VIRTUAL)
    try:
        cluster.up(image_store())
        yield cluster
    finally:
        if not keep:
            cluster.down()


@pytest.fixture(scope="session")
def slice_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the archive of an image with a program that allocates memory of a card."""
    return image_archive(tmp_path_factory.mktemp("image"))


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
