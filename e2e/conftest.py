"""One cluster for all the tests of a session; FENKA_E2E_KEEP=1 leaves it running to look at it.

FENKA_E2E_TIER=full also runs the scenarios that take minutes each and are marked `full`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import STATE, Cluster
from e2e.images import image_store
from e2e.machine import ClusterError

HERE = Path(__file__).parent
# Bringing the cluster up counts for whichever test comes first.
SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time than those that start no cluster; skip the second tier unless asked for."""
    full = os.environ.get("FENKA_E2E_TIER") == "full"
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS))
        if item.get_closest_marker("full") and not full:
            item.add_marker(
                pytest.mark.skip(reason="of the second tier: FENKA_E2E_TIER=full runs it")
            )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, sd-cluster-04 and sd-cluster-05, on which every image of e2e.images can be used.

    The tests share it: what a test creates, it removes (the fixture `namespace` does that for it).
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
    """A namespace of the test's own, gone afterwards with all that is in it."""
    with cluster.namespace(request.node.name) as name:
        yield name
