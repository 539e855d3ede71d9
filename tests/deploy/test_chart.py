"""Test what the Helm chart renders and rejects. Needs helm; tests on a cluster are in e2e."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fenka.cluster.objects import QUEUE_GATE
from fenka.dialects import nvidia, resize
from fenka.dialects.registry import DIALECTS, WITH_HAMI

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"

Json = dict[str, Any]


def find_helm() -> str | None:
    """Return helm's path: on PATH, or built by `make e2e`."""
    built = sorted(Path("~/.cache/fenka-e2e").expanduser().glob("helm-*/bin/helm"))
    return os.environ.get("HELM") or shutil.which("helm") or next(map(str, built), None)


HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not on the PATH, and `make e2e` has not built it"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm."""
    assert HELM
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(**values: Any) -> list[Json]:
    """Render the chart with these values and return its objects."""
    options = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    done = helm("template", "fenka", str(CHART), "--namespace", "gpu", *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def find(objects: list[Json], kind: str, name: str) -> Json:
    """Return the only object of this kind and name."""
    (document,) = (
        document
        for document in objects
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    )
    return document


def pod_of(workload: Json) -> Json:
    """Return the pod spec of a workload."""
    pod: Json = workload["spec"]["template"]["spec"]
    return pod


T4 = {"nodeSelector": {"fenka.io/simulated": "t4"}, "spec": "T4"}


@needs_helm
def test_chart_has_no_lint_warnings_when_every_option_is_on() -> None:
    """Lint the default values and all options."""
    everything = [
        "secondScheduler.enabled=true",
        "serviceMonitor.enabled=true",
        "dashboard.enabled=true",
        "node.metrics.enabled=true",
        "networkPolicy.enabled=true",
    ]
    for options in ([], [f"--set={setting}" for setting in everything]):
        done = helm("lint", "--strict", str(CHART), *options)
        assert done.returncode == 0, done.stdout


@needs_helm
def test_scheduler_runs_unprivileged_on_a_read_only_root() -> None:
    """It needs no privileges on its node and no GPU."""
    pod = pod_of(find(render(), "Deployment", "fenka-scheduler"))
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [volume["name"] for volume in pod["volumes"]] == ["tls"]
    assert set(container["resources"]["limits"]) == {"memory"}
    assert pod["enableServiceLinks"] is False


@needs_helm
def test_service_has_the_ports_of_gpushare() -> None:
    """NodePort 32766 to 12345, so that configurations for gpushare's extender reach fenka's."""
    service = find(render(), "Service", "fenka-scheduler")["spec"]
    (port,) = service["ports"]
    assert (service["type"], port["nodePort"], port["port"]) == ("NodePort", 32766, 12345)
    assert service["publishNotReadyAddresses"] is False


def names_of(objects: list[Json], *kinds: str) -> set[str]:
    """Return the names of the objects of these kinds."""
    return {document["metadata"]["name"] for document in objects if document["kind"] in kinds}


def arguments(objects: list[Json]) -> list[str]:
    """Return the extender's arguments."""
    (container,) = pod_of(find(objects, "Deployment", "fenka-scheduler"))["containers"]
    args: list[str] = container["args"]
    return args


@needs_helm
def test_extender_requires_client_certificates_when_values_are_defaults() -> None:
    """A Job creates the certificates, with rights to its own Secrets only."""
    objects = render()
    assert "--tls=/etc/fenka/tls" in arguments(objects)
    pod = pod_of(find(objects, "Deployment", "fenka-scheduler"))
    (volume,) = pod["volumes"]
    files = {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    server, client = "fenka-scheduler-server", "fenka-scheduler-client"
    assert files == {
        "ca.crt": (server, "ca.crt"),
        "server.crt": (server, "tls.crt"),
        "server.key": (server, "tls.key"),
        "client.crt": (client, "tls.crt"),
        "client.key": (client, "tls.key"),
    }
    role = find(objects, "Role", "fenka-certificates")
    assert {tuple(rule["resources"]) for rule in role["rules"]} == {("secrets",)}
    create, rest = role["rules"]
    assert create["verbs"] == ["create"]
    assert set(rest["resourceNames"]) == {"fenka-scheduler-authority", server, client}
    assert role["metadata"]["namespace"] == "gpu"


@needs_helm
def test_certificate_job_has_another_name_when_its_arguments_change() -> None:
    """Jobs are immutable: an upgrade that changed one would fail."""
    jobs = [
        names_of(render(**values), "Job")
        for values in ({}, {}, {"scheduler.tls.hosts": ["gpu.example.com"]}, {"image.tag": "2"})
    ]
    assert jobs[0] == jobs[1]
    assert len({*map(tuple, jobs)}) == 3
    (container,) = pod_of(
        next(
            document
            for document in render(**{"scheduler.tls.hosts": ["h"]})
            if document["kind"] == "Job"
        )
    )["containers"]
    assert container["args"] == [
        "certificates",
        "--make",
        "--service=fenka-scheduler",
        "--host=h",
    ]


@needs_helm
def test_no_certificates_are_rendered_when_tls_is_off() -> None:
    """For gpushare's configurations; also with the values of an older release."""
    for values in ({"scheduler.tls.enabled": False}, {"scheduler.tls": None}):
        objects = render(**values, **{"secondScheduler.enabled": True})
        assert not [argument for argument in arguments(objects) if "tls" in argument]
        assert "volumes" not in pod_of(find(objects, "Deployment", "fenka-scheduler"))
        assert not names_of(objects, "Job", "CronJob")
        text = find(objects, "ConfigMap", "fenka-second-scheduler")["data"]["config.yaml"]
        (extender,) = yaml.safe_load(text)["extenders"]
        assert extender["urlPrefix"].startswith("http://fenka-scheduler.gpu.svc:12345/")
        assert extender["enableHTTPS"] is False
        assert "tlsConfig" not in extender


@needs_helm
def test_read_endpoints_are_off_when_values_disable_them() -> None:
    """They have their own port and Service, without a NodePort."""
    objects = render()
    service = find(objects, "Service", "fenka-scheduler-read")["spec"]
    assert service.get("type", "ClusterIP") == "ClusterIP"
    assert [(port["name"], port["port"]) for port in service["ports"]] == [("http", 12346)]
    assert not {"--no-inspect", "--no-metrics"} & {*arguments(objects)}
    closed = {"scheduler.read.inspect": False, "scheduler.read.metrics": False}
    assert {"--no-inspect", "--no-metrics"} <= {*arguments(render(**closed))}
    for values in ({"scheduler.read": None}, {"scheduler.bodies": None}):
        assert "--read-port=12346" in arguments(render(**values))


@needs_helm
def test_network_policy_admits_only_named_peers_when_enabled() -> None:
    """Replicas and the second scheduler are admitted; others if values name them."""
    assert not names_of(render(), "NetworkPolicy")
    nodes = [{"ipBlock": {"cidr": "192.168.1.0/24"}}]
    monitoring: list[Json] = [{"namespaceSelector": {}}]
    objects = render(
        **{
            "networkPolicy.enabled": True,
            "networkPolicy.schedulers": nodes,
            "networkPolicy.readers": monitoring,
            "secondScheduler.enabled": True,
        }
    )
    decide, read = find(objects, "NetworkPolicy", "fenka-scheduler")["spec"]["ingress"]
    assert decide["ports"] == [{"port": "extender"}]
    components = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in decide["from"]
        if "podSelector" in peer
    ]
    assert components == ["scheduler", "second-scheduler"]
    assert decide["from"][2:] == nodes
    assert (read["ports"], read["from"]) == ([{"port": "http"}], monitoring)
    closed = render(**{"networkPolicy.enabled": True})
    assert len(find(closed, "NetworkPolicy", "fenka-scheduler")["spec"]["ingress"]) == 1
    assert find(closed, "NetworkPolicy", "fenka-node")["spec"]["ingress"] == []


@needs_helm
def test_binding_is_limited_to_named_schedulers_when_names_are_set() -> None:
    """Without names, pods of any scheduler are bound."""
    assert not [argument for argument in arguments(render()) if "scheduler-name" in argument]
    named = render(**{"scheduler.bindsFor": ["default-scheduler", "fenka"]})
    assert "--scheduler-name=default-scheduler" in arguments(named)
    assert "--scheduler-name=fenka" in arguments(named)


@needs_helm
def test_configurations_evaluate_every_node_when_there_are_more_than_a_hundred() -> None:
    """By default kube-scheduler stops early, and a pod that fits only on the last node stays pending."""
    second = find(
        render(**{"secondScheduler.enabled": True}), "ConfigMap", "fenka-second-scheduler"
    )
    pasted = (CHART / "files" / "scheduler-config.yaml").read_text()
    for text in (second["data"]["config.yaml"], pasted):
        assert yaml.safe_load(text)["percentageOfNodesToScore"] == 100
    for page in ("docs/kubernetes.md", "docs/scheduler.md", "deploy/chart/templates/NOTES.txt"):
        assert "percentageOfNodesToScore: 100" in (ROOT / page).read_text(), page


RULES = {
    "fenka-scheduler": {
        ("", "nodes"): {"list", "watch"},
        ("", "pods"): {"get", "list", "watch", "patch"},
        ("", "pods/binding"): {"create"},
        ("", "pods/eviction"): {"create"},
        ("scheduling.k8s.io", "podgroups"): {"list", "watch"},
        ("policy", "poddisruptionbudgets"): {"list", "watch"},
        ("events.k8s.io", "events"): {"create", "patch"},
    },
    "fenka-node": {
        ("", "nodes"): {"get", "list", "watch", "patch"},
        ("", "nodes/status"): {"patch"},
        ("", "pods"): {"list", "watch", "patch"},
        ("node.k8s.io", "runtimeclasses"): {"get"},
        ("events.k8s.io", "events"): {"create", "patch"},
    },
}


@needs_helm
@pytest.mark.parametrize("name", sorted(RULES))
def test_cluster_role_has_exactly_the_documented_rights(name: str) -> None:
    """Nothing reads Secrets, and nothing updates whole pods."""
    rights: dict[tuple[str, str], set[str]] = {}
    for rule in find(render(), "ClusterRole", name)["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights.setdefault((group, resource), set()).update(rule["verbs"])
    assert rights == RULES[name]


@needs_helm
def test_node_may_evict_when_over_limit_is_evict() -> None:
    """Otherwise the node program has no right to evict."""
    role = find(render(**{"node.overLimit": "evict"}), "ClusterRole", "fenka-node")
    assert {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]} in role["rules"]


@needs_helm
def test_other_rights_are_limited_to_one_namespace() -> None:
    """Leases are in the replicas' namespace, ConfigMaps in that of the health daemon."""
    objects = render()
    leader = find(objects, "Role", "fenka-scheduler-leader")
    health = find(objects, "Role", "fenka-scheduler-health")
    assert leader["metadata"]["namespace"] == "gpu"
    assert leader["rules"][1]["resourceNames"] == ["fenka-scheduler"]
    assert health["metadata"]["namespace"] == "kube-system"


def terms(workload: Json) -> list[Json]:
    """Return the alternatives of a workload's node affinity."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    alternatives: list[Json] = pod_of(workload)["affinity"]["nodeAffinity"][required][
        "nodeSelectorTerms"
    ]
    return alternatives


@needs_helm
def test_node_program_runs_on_labelled_nodes_unless_all_nodes_is_set() -> None:
    """Any value of a label counts: `false` turns sharing off and the exclusive plugin on."""
    alternatives = terms(find(render(), "DaemonSet", "fenka-node"))
    assert [term["matchExpressions"] for term in alternatives] == [
        [{"key": "gpushare", "operator": "Exists"}],
        [{"key": "cgpu", "operator": "Exists"}],
        [{"key": "nvidia-device-enable", "operator": "Exists"}],
        [{"key": "ack.node.gpu.schedule", "operator": "Exists"}],
    ]
    everywhere = find(render(**{"node.allNodes": True}), "DaemonSet", "fenka-node")
    assert "affinity" not in pod_of(everywhere)


@needs_helm
def test_files_of_slices_are_on_the_host_when_the_node_program_is_replaced() -> None:
    """The files that running pods use are in hostPath volumes."""
    pod = pod_of(find(render(), "DaemonSet", "fenka-node"))
    (container,) = pod["containers"]
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    # The runtime finds them on the host by the paths that the program uses.
    for name in ("cdi", "run", "state"):
        assert paths[name] == mounts[name]
    (run,) = (mount for mount in container["volumeMounts"] if mount["name"] == "run")
    assert run["mountPropagation"] == "Bidirectional"
    assert pod["hostPID"] is True


@needs_helm
def test_simulated_cards_are_not_restarted_when_fenka_is_upgraded() -> None:
    """Their DaemonSet updates OnDelete, and each node has one node program."""
    objects = render(simulatedCards=[T4])
    cards = find(objects, "DaemonSet", "fenka-cards-0")
    assert cards["spec"]["updateStrategy"] == {"type": "OnDelete"}
    (container,) = pod_of(cards)["containers"]
    assert container["args"] == ["sim", "node", "T4", "--directory", "/run/fenka/simulated"]
    simulated = pod_of(find(objects, "DaemonSet", "fenka-node-simulated-0"))
    assert "--simulated=/run/fenka/simulated" in simulated["containers"][0]["args"]
    assert simulated["nodeSelector"] == T4["nodeSelector"]
    excluded = {"key": "fenka.io/simulated", "operator": "NotIn", "values": ["t4"]}
    for term in terms(find(objects, "DaemonSet", "fenka-node")):
        assert excluded in term["matchExpressions"]


def extenders() -> Json:
    """Return the extender of the scheduler configuration that users paste."""
    written = yaml.safe_load((CHART / "files" / "scheduler-config.yaml").read_text())
    (extender,) = written["extenders"]
    assert isinstance(extender, dict)
    return extender


@needs_helm
def test_second_scheduler_calls_the_same_extender_when_enabled() -> None:
    """It differs from the pasted configuration only in the Service's name and the certificates' paths."""
    objects = render(**{"secondScheduler.enabled": True})
    text = find(objects, "ConfigMap", "fenka-second-scheduler")["data"]["config.yaml"]
    (extender,) = yaml.safe_load(text)["extenders"]
    url = "https://fenka-scheduler.gpu.svc:12345/gpushare-scheduler"
    kinds = {"caFile": "ca.crt", "certFile": "client.crt", "keyFile": "client.key"}
    tls = {kind: f"/etc/fenka-tls/{name}" for kind, name in kinds.items()}
    assert extender == {**extenders(), "urlPrefix": url, "tlsConfig": tls}
    pasted = {kind: f"/etc/kubernetes/fenka/{name}" for kind, name in kinds.items()}
    assert extenders()["tlsConfig"] == pasted
    pod = pod_of(find(objects, "Deployment", "fenka-second-scheduler"))
    (mounted,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls")
    assert mounted["secretName"] == "fenka-scheduler-client"
    assert [item["path"] for item in mounted["items"]] == list(kinds.values())


def test_managed_resources_are_those_of_all_dialects() -> None:
    """Resources that no node reports are ignored by kube-scheduler itself."""
    managed = {
        resource["name"]: resource["ignoredByScheduler"]
        for resource in extenders()["managedResources"]
    }
    names = {name for dialect in WITH_HAMI for name in dialect.RESOURCES}
    assert managed == {name: name in nvidia.HAMI_ONLY for name in names}


ADMISSION = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


@needs_helm
@pytest.mark.parametrize("hami", [False, True])
def test_gate_policy_matches_every_resource_that_the_queue_orders(hami: bool) -> None:
    """Whole cards also exist on nodes that fenka does not serve, so kube-scheduler orders those pods."""
    done = helm(
        *("template", "fenka", str(CHART), "--api-versions", ADMISSION),
        *("--set", f"hamiNames={str(hami).lower()},secondScheduler.enabled=true"),
    )
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    policy = find(objects, "MutatingAdmissionPolicy", "fenka-queue-gate")["spec"]
    conditions = {
        condition["name"]: condition["expression"] for condition in policy["matchConditions"]
    }
    names = [
        resource["name"]
        for resource in extenders()["managedResources"]
        if resource["name"] != "nvidia.com/gpu"
    ]
    for name in names:
        assert (json.dumps(name) in conditions["requests-a-card"]) == (
            hami or name not in nvidia.HAMI_ONLY
        )
    assert '"nvidia.com/gpu"' not in conditions["requests-a-card"]
    assert '["default-scheduler","fenka"]' in conditions["placed-by-kube-scheduler"]
    assert QUEUE_GATE in policy["mutations"][0]["applyConfiguration"]["expression"]
    assert policy["failurePolicy"] == "Ignore"


@needs_helm
def test_queue_options_are_left_out_when_values_come_from_an_older_release() -> None:
    """`helm upgrade --reuse-values` does not add values that are new in this release."""
    older = {"scheduler.order": {"halfLifeSeconds": None, "gate": None, "schedulerNames": None}}
    (container,) = pod_of(find(render(**older), "Deployment", "fenka-scheduler"))["containers"]
    assert not [argument for argument in container["args"] if argument.startswith("--half-life")]
    (container,) = pod_of(find(render(), "Deployment", "fenka-scheduler"))["containers"]
    assert "--half-life=3600" in container["args"]


@needs_helm
def test_gate_policy_is_absent_when_the_api_is_missing_or_the_value_is_off() -> None:
    """Kubernetes before 1.36 does not have the API."""
    assert not [
        document
        for document in render()
        if "AdmissionPolicy" in document["kind"] and "gate" in document["metadata"]["name"]
    ]
    off = helm(
        *("template", "fenka", str(CHART), "--api-versions", ADMISSION),
        *("--set", "scheduler.order.gate=false"),
    )
    assert "queue-gate" not in off.stdout


def test_guide_quotes_the_scheduler_configuration_verbatim() -> None:
    """The guide contains the file's text."""
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    assert (CHART / "files" / "scheduler-config.yaml").read_text() in guide


def read_dashboard() -> Json:
    """Return the chart's dashboard."""
    board: Json = json.loads((CHART / "files" / "dashboard.json").read_text())
    return board


def test_dashboard_queries_cover_pods_and_cards() -> None:
    """Used memory, limit and utilisation of pods; temperature and power of cards."""
    queries = " ".join(
        target["expr"] for panel in read_dashboard()["panels"] for target in panel["targets"]
    )
    for metric in (
        "fenka_container_gpu_memory_used_bytes",
        "fenka_container_gpu_memory_limit_bytes",
        "fenka_container_gpu_utilization_ratio",
        "fenka_card_temperature_celsius",
        "fenka_card_power_watts",
    ):
        assert metric in queries


@needs_helm
def test_monitors_honor_labels_when_enabled() -> None:
    """Otherwise Prometheus replaces the measured pod's name by the scraped pod's."""
    objects = render(**{"serviceMonitor.enabled": True, "node.metrics.enabled": True})
    endpoints = [
        endpoint
        for document in objects
        for kind in ("endpoints", "podMetricsEndpoints")
        for endpoint in document.get("spec", {}).get(kind, [])
    ]
    assert [endpoint["honorLabels"] for endpoint in endpoints] == [True, True]


@needs_helm
@pytest.mark.parametrize(
    "invalid",
    [
        {"node.unit": "GB"},
        {"scheduler.policy": "best"},
        {"scheduler.replica": 3},
        {"simulatedCards": [{"spec": "T4"}]},
        {"node.overLimit": "kill"},
    ],
    ids=str,
)
def test_schema_rejects_values_when_they_are_invalid(invalid: Json) -> None:
    """The schema rejects them before anything is installed."""
    options = [f"--set-json={key}={json.dumps(value)}" for key, value in invalid.items()]
    done = helm("template", "fenka", str(CHART), *options)
    assert done.returncode != 0
    assert "schema" in done.stderr


@needs_helm
def test_replicas_are_replaced_and_drained_one_at_a_time() -> None:
    """Both replicas are ready; a single one stays until its successor is ready and never blocks a drain."""
    objects = render()
    deployment = find(objects, "Deployment", "fenka-scheduler")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 1}
    budget = find(objects, "PodDisruptionBudget", "fenka-scheduler")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["spec"]["selector"]
    (container,) = pod_of(deployment)["containers"]
    fields = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"]
    }
    assert fields["POD_IP"] == "status.podIP"
    alone = find(render(**{"scheduler.replicas": 1}), "Deployment", "fenka-scheduler")
    assert alone["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def policy(name: str, **values: Any) -> Json:
    """Return the spec of one of the chart's admission policies."""
    spec: Json = find(render(**values), "ValidatingAdmissionPolicy", f"fenka-{name}")["spec"]
    return spec


def variable(spec: Json, name: str) -> Any:
    """Return the list in a variable of an admission policy."""
    (expression,) = (entry["expression"] for entry in spec["variables"] if entry["name"] == name)
    return json.loads(expression)


@needs_helm
@pytest.mark.parametrize("hami", [False, True])
def test_admission_policy_protects_every_record_of_the_dialects(hami: bool) -> None:
    """The names are those of the code, with HAMi's only if they are enabled."""
    spec = policy("records", hamiNames=hami)
    dialects = WITH_HAMI if hami else DIALECTS
    keys = {*resize.RECORDS, *(key for dialect in dialects for key in dialect.RECORDS)}
    protected = variable(spec, "records") + variable(spec, "prefixes")
    assert sorted(protected) == sorted(keys)
    assert all(prefix.endswith("-") for prefix in variable(spec, "prefixes"))
    cards = variable(policy("placement", hamiNames=hami), "cards")
    assert sorted(cards) == sorted({name for dialect in dialects for name in dialect.RESOURCES})
    assert resize.REQUEST not in protected


@needs_helm
def test_extra_users_may_write_records_when_values_name_them() -> None:
    """For example the former plugin's account during a migration."""
    extra = "system:serviceaccount:kube-system:gpushare"
    spec = policy("records", **{"admission.extraUsers": [extra]})
    (condition,) = spec["matchConditions"]
    for user in (
        "system:serviceaccount:gpu:fenka-scheduler",
        "system:serviceaccount:gpu:fenka-node",
        extra,
    ):
        assert f'"{user}"' in condition["expression"]


@needs_helm
def test_admission_policies_are_bound_unless_switched_off() -> None:
    """Check policies and bindings, and that none is rendered when they are off."""

    def kinds(objects: list[Json]) -> list[str]:
        return [
            document["kind"]
            for document in objects
            if document["kind"].startswith("ValidatingAdmission")
        ]

    assert kinds(render()) == [
        *["ValidatingAdmissionPolicy"] * 3,
        *["ValidatingAdmissionPolicyBinding"] * 3,
    ]
    for document in render():
        if document["kind"] == "ValidatingAdmissionPolicyBinding":
            assert document["spec"]["validationActions"] == ["Deny"]
            assert document["spec"]["policyName"] == document["metadata"]["name"]
    assert kinds(render(**{"admission.enabled": False})) == []
