"""Install fenka from a registry: image and chart are pushed there, nodes and helm pull them."""

import hashlib
import json
from collections.abc import Iterator

import pytest

from e2e import artifacts
from e2e.cluster import Cluster, wait_until
from e2e.oci_registry import OciRegistry, running_registry
from e2e.scenarios.conftest import VALUES, install, uninstall
from e2e.scenarios.installation import (
    CERTIFICATES,
    MEMORY,
    RELEASE,
    SCHEDULER_CONFIGURATION,
    Installation,
    on_control_plane,
)

NAMESPACE = "fenka-system"
NODE = "sd-cluster-05"
POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: pulled}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: localhost/fenka-workload:e2e
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {{limits: {{{MEMORY}: 2}}}}
"""


@pytest.fixture
def registry(installation: Installation) -> Iterator[OciRegistry]:
    """Provide a registry, and a cluster without fenka."""
    cluster = installation.cluster
    with running_registry(cluster) as registry:
        try:
            uninstall(cluster, RELEASE)
            cluster.set_scheduler_configuration(None)
            yield registry
        finally:
            installation.label(NODE, "gpushare-")
            cluster.kubectl("delete", "pod", "pulled", "--ignore-not-found", "--now")
            uninstall(cluster, NAMESPACE)
            # The tests of other modules need fenka, whatever has happened here.
            install(cluster)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_chart_and_image_are_installed_when_a_registry_has_them(
    registry: OciRegistry, installation: Installation
) -> None:
    """Nodes pull the image by its digest, and a pod gets a slice."""
    cluster = installation.cluster
    version = artifacts.release(artifacts.chart_folder()).version
    image = f"{registry.address}/gpu/fenka"
    registry.push_image(artifacts.release_image(), f"gpu/fenka:{version}")
    registry.push_chart(artifacts.CHART, "charts")
    index = registry.index(f"gpu/fenka:{version}")
    platforms = [manifest["platform"] for manifest in json.loads(index)["manifests"]]
    assert [platform["architecture"] for platform in platforms] == ["amd64", "arm64"]
    digest = f"sha256:{hashlib.sha256(index).hexdigest()}"

    install_from(registry, cluster, f"image.repository={image},image.digest={digest}")
    cluster.set_scheduler_configuration(SCHEDULER_CONFIGURATION.read_text())
    installation.label(NODE, "gpushare=true")
    installation.wait_for_allocatable(NODE, MEMORY, 14)
    cluster.apply(POD)
    cluster.wait_for_pod("pulled")

    pods = [pod for pod in cluster.list("pods", NAMESPACE) if pod["status"]["phase"] == "Running"]
    used = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert used == {f"{image}:{version}@{digest}"}
    assert "Successfully pulled image" in " ".join(
        event["message"] for event in cluster.list("events", NAMESPACE)
    )


def install_from(registry: OciRegistry, cluster: Cluster, settings: str) -> None:
    """Install the chart as a user would who has no checkout."""
    values = cluster.state / "pulled.yaml"
    values.write_text(VALUES.replace(VALUES.strip().splitlines()[0], "image: {}"))
    cluster.helm(
        *("install", RELEASE, f"oci://{registry.address}/charts/fenka", "-n", NAMESPACE),
        *("--create-namespace", f"--ca-file={registry.authority}", "-f", str(values)),
        *("--set", settings, "--wait", "--timeout=180s"),
    )
    certificates = f"fenka certificates -n {NAMESPACE} --into {CERTIFICATES}"
    wait_until("the certificates", lambda: on_control_plane(cluster, certificates))
