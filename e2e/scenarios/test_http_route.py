"""Divide a service's requests by an HTTPRoute, with a controller of the Gateway API."""

from collections import Counter
from pathlib import Path

import pytest

from e2e.cluster import wait_until
from e2e.engines import GatewayApi
from e2e.machine import ClusterError
from e2e.scenarios.installation import Installation
from e2e.scenarios.services import HTTP, NAME, Services
from e2e.scenarios.serving.load import Request, read

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SLICE = ("--gpu-mem=4", "--gpu-core=30")
ROUTE = "web"


def test_route_moves_requests_to_a_new_version_until_the_old_one_is_deleted(
    shared: Installation, gateway_api: GatewayApi, namespace: str, tmp_path: Path
) -> None:
    """By the service's gateway, at 90:10, at 0:100, and while v1 is deleted: no request fails."""
    services, url = Services(shared, namespace), f"http://{gateway_api.address}"
    for version in ("v1", "v2"):
        services.serve(version, *SLICE)
    for version in ("v1", "v2"):
        services.wait_for_replicas(1, f"servingVersion={version}")
    gateway_api.apply_route(namespace, ROUTE, HTTP, {NAME: 1})
    fetch = shared.cluster.fetch
    wait_until("an answer", lambda: fetch(f"{url}/healthz").strip() == "ok", 120)

    with services.load(tmp_path / "canary", "20x20", url=url):
        wait_until("requests", lambda: count(tmp_path / "canary") > 50)
        split(services, gateway_api, "v1:90", "v2:10")
    assert all(request.right for request in read(tmp_path / "canary"))
    requests = services.send(tmp_path / "split", "50x20", url=url)
    assert all(request.right for request in requests)
    versions = Counter(request.version for request in requests)
    assert versions.total() == 1000
    # 100 in the mean, and five standard deviations.
    assert 53 <= versions["v2"] <= 147

    with services.load(tmp_path / "move", "20x20", url=url):
        wait_until("requests", lambda: count(tmp_path / "move") > 50)
        split(services, gateway_api, "v1:0", "v2:100")
    requests = read(tmp_path / "move")
    assert all(request.right for request in requests)
    assert only_by("v2", requests[-20:])

    # Its gateway still leads clients of the service's own address to v1.
    with pytest.raises(ClusterError, match="v1 gets all requests"):
        services.fenka("serve", "delete", NAME, "-v", "v1")
    services.fenka("traffic-split", "--name", NAME, "-v", "v2:100")
    with services.load(tmp_path / "deletion", "20x30", url=url):
        wait_until("requests", lambda: count(tmp_path / "deletion") > 50)
        services.fenka("serve", "delete", NAME, "-v", "v1")
        services.wait_for_replicas(0, "servingVersion=v1")
    requests = read(tmp_path / "deletion")
    assert all(request.right for request in requests)
    assert only_by("v2", requests)


def split(services: Services, gateway_api: GatewayApi, *weights: str) -> None:
    """Set the weights of versions in the route, and wait until it has its effect."""
    options = [part for weight in weights for part in ("-v", weight)]
    services.fenka("traffic-split", "--name", NAME, *options, "--http-route", ROUTE)
    gateway_api.wait_for_route(services.namespace, ROUTE)


def only_by(version: str, requests: list[Request]) -> bool:
    """Return whether one version has answered all of these requests."""
    return {request.version for request in requests} == {version}


def count(file: Path) -> int:
    """Return the number of requests that have ended; the file may not exist yet."""
    return len(file.read_text().splitlines()) if file.exists() else 0
