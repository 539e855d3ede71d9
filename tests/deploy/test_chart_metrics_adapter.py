"""Test the metrics adapter that the chart installs: its rights, its certificate and its API."""

from pathlib import Path
from typing import Any

from fenka.metrics_adapter.main import AdapterOptions
from fenka.metrics_adapter.server import NAME
from fenka.metrics_adapter.values import NODE_PORT, NODE_PROGRAMS
from tests.deploy.chart import T4, Json, find, names_of, needs_helm, pod_of, render

ADAPTER = "fenka-metrics-adapter"


def rendered(**values: Any) -> list[Json]:
    """Return the objects of a chart with the adapter."""
    return render(**{"metricsAdapter.enabled": True, **values})


@needs_helm
def test_adapter_is_not_installed_unless_it_is_enabled() -> None:
    """Also with the values of an older release."""
    for values in ({}, {"metricsAdapter": None}):
        objects = render(**values)
        assert ADAPTER not in names_of(objects, "Deployment", "Service", "ClusterRole")
        assert not names_of(objects, "APIService")


@needs_helm
def test_adapter_runs_unprivileged_with_a_certificate_of_its_own() -> None:
    """It has no other Secret, and not the scheduler's key."""
    pod = pod_of(find(rendered(), "Deployment", ADAPTER))
    (container,) = pod["containers"]
    assert container["args"] == [
        "metrics-adapter",
        "--tls=/etc/fenka/tls",
        f"--service={ADAPTER}",
    ]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (volume,) = pod["volumes"]
    assert volume["secret"]["secretName"] == f"{ADAPTER}-server"
    files = {item["path"] for item in volume["secret"]["items"]}
    assert files == {"ca.crt", "server.crt", "server.key"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = AdapterOptions(tls=Path())
    assert ports == {"https": defaults.port, "probes": defaults.probe_port}


@needs_helm
def test_certificate_is_made_when_the_adapter_is_enabled_even_without_the_extenders_tls() -> None:
    """The API server accepts no API without TLS."""
    for values in ({}, {"scheduler.tls.enabled": False}, {"scheduler.tls": None}):
        objects = rendered(**values)
        role = find(objects, "Role", "fenka-certificates")
        assert f"{ADAPTER}-server" in role["rules"][1]["resourceNames"]
        (job,) = (document for document in objects if document["kind"] == "Job")
        (container,) = pod_of(job)["containers"]
        assert f"--adapter={ADAPTER}" in container["args"]


@needs_helm
def test_adapter_has_exactly_the_documented_rights() -> None:
    """It lists pods, and changes the one APIService."""
    objects = rendered()
    assert find(objects, "ClusterRole", ADAPTER)["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {
            "apiGroups": ["apiregistration.k8s.io"],
            "resources": ["apiservices"],
            "resourceNames": [NAME],
            "verbs": ["get", "patch"],
        },
    ]
    binding = find(objects, "RoleBinding", ADAPTER)
    assert binding["metadata"]["namespace"] == "kube-system"
    assert binding["roleRef"]["name"] == "extension-apiserver-authentication-reader"


@needs_helm
def test_api_refers_to_the_adapters_service_and_requires_its_certificate() -> None:
    """The adapter adds the authority: a chart does not know it."""
    objects = rendered()
    spec = find(objects, "APIService", NAME)["spec"]
    assert spec["service"] == {"name": ADAPTER, "namespace": "gpu", "port": 443}
    assert "insecureSkipTLSVerify" not in spec
    service = find(objects, "Service", ADAPTER)["spec"]
    assert service["ports"] == [{"name": "https", "port": 443, "targetPort": "https"}]
    pods = find(objects, "Deployment", ADAPTER)["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= pods.items()


@needs_helm
def test_node_programs_are_found_by_the_labels_that_the_adapter_selects() -> None:
    """Both of real and of simulated cards, with the port of their metrics."""
    wanted = dict(term.split("=") for term in NODE_PROGRAMS.split(","))
    objects = rendered(simulatedCards=[T4])
    workloads = [document for document in objects if document["kind"] == "DaemonSet"]
    programs = [
        document
        for document in workloads
        if wanted.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert len(programs) == 2
    for program in programs:
        (container,) = pod_of(program)["containers"]
        assert [port["name"] for port in container["ports"]] == [NODE_PORT]


@needs_helm
def test_network_policies_admit_api_servers_and_the_adapter_when_enabled() -> None:
    """The adapter reads the node programs' metrics."""
    peers: list[Json] = [{"ipBlock": {"cidr": "192.168.1.200/32"}}]
    objects = rendered(**{"networkPolicy.enabled": True, "networkPolicy.apiServers": peers})
    (ingress,) = find(objects, "NetworkPolicy", ADAPTER)["spec"]["ingress"]
    assert ingress == {"ports": [{"port": "https"}], "from": peers}
    (ingress,) = find(objects, "NetworkPolicy", "fenka-node")["spec"]["ingress"]
    (peer,) = ingress["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "metrics-adapter"
    closed = rendered(**{"networkPolicy.enabled": True})
    assert find(closed, "NetworkPolicy", ADAPTER)["spec"]["ingress"] == []
