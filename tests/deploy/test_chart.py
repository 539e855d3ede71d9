"""The Helm chart: what it renders, and what it refuses. Needs helm; its cluster tests are in e2e."""

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
    """On the PATH, or as `make e2e` has built it."""
    built = sorted(Path("~/.cache/fenka-e2e").expanduser().glob("helm-*/bin/helm"))
    return os.environ.get("HELM") or shutil.which("helm") or next(map(str, built), None)


HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None, reason="no helm on the PATH, and `make e2e` has not built one"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it."""
    assert HELM
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(**values: Any) -> list[Json]:
    """The chart's objects with these values."""
    given = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    done = helm("template", "fenka", str(CHART), "--namespace", "gpu", *given)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def find(objects: list[Json], kind: str, name: str) -> Json:
    """The object of this kind and name."""
    (document,) = (
        document
        for document in objects
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    )
    return document


def pod_of(workload: Json) -> Json:
    """The pod that a workload makes."""
    pod: Json = workload["spec"]["template"]["spec"]
    return pod


T4 = {"nodeSelector": {"fenka.io/simulated": "t4"}, "spec": "T4"}


@needs_helm
def test_chart_has_no_lint_warnings_when_every_option_is_on() -> None:
    """No warnings, with everything turned on too."""
    everything = [
        "secondScheduler.enabled=true",
        "serviceMonitor.enabled=true",
        "dashboard.enabled=true",
        "node.metrics.enabled=true",
        "networkPolicy.enabled=true",
    ]
    for given in ([], [f"--set={setting}" for setting in everything]):
        done = helm("lint", "--strict", str(CHART), *given)
        assert done.returncode == 0, done.stdout


@needs_helm
def test_scheduler_runs_unprivileged_on_a_read_only_root() -> None:
    """It needs no rights on its node, and no GPU memory."""
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
    """NodePort 32766 to 12345: configurations that name gpushare's extender find fenka's."""
    service = find(render(), "Service", "fenka-scheduler")["spec"]
    (port,) = service["ports"]
    assert (service["type"], port["nodePort"], port["port"]) == ("NodePort", 32766, 12345)
    assert service["publishNotReadyAddresses"] is False


def names_of(objects: list[Json], *kinds: str) -> set[str]:
    """The names of the objects of these kinds."""
    return {document["metadata"]["name"] for document in objects if document["kind"] in kinds}


def arguments(objects: list[Json]) -> list[str]:
    """Of the extender."""
    (container,) = pod_of(find(objects, "Deployment", "fenka-scheduler"))["containers"]
    args: list[str] = container["args"]
    return args


@needs_helm
def test_extender_requires_client_certificates_when_values_are_defaults() -> None:
    """A Job makes the certificates, and its rights reach its own Secrets alone."""
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
    """Jobs cannot be changed: an upgrade that did would fail."""
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
        "--name=fenka-scheduler",
        "--host=h",
    ]


@needs_helm
def test_no_certificates_are_rendered_when_tls_is_off() -> None:
    """For configurations made for gpushare; also where the values are those of an older release."""
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
    """It has a port and a Service of its own, which no NodePort leads to."""
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
    """Replicas and the second scheduler are let in; others as they are named."""
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
    """Empty: any."""
    assert not [argument for argument in arguments(render()) if "scheduler-name" in argument]
    given = render(**{"scheduler.bindsFor": ["default-scheduler", "fenka"]})
    assert "--scheduler-name=default-scheduler" in arguments(given)
    assert "--scheduler-name=fenka" in arguments(given)


@needs_helm
def test_configurations_evaluate_every_node_when_there_are_more_than_a_hundred() -> None:
    """Above a hundred kube-scheduler would stop early, and a pod that fits on the last one would wait."""
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
    """Just these, in the whole cluster; nothing reads secrets, nothing writes all of a pod."""
    rights: dict[tuple[str, str], set[str]] = {}
    for rule in find(render(), "ClusterRole", name)["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights.setdefault((group, resource), set()).update(rule["verbs"])
    assert rights == RULES[name]


@needs_helm
def test_node_may_evict_when_over_limit_is_evict() -> None:
    """node.overLimit=evict."""
    role = find(render(**{"node.overLimit": "evict"}), "ClusterRole", "fenka-node")
    assert {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]} in role["rules"]


@needs_helm
def test_other_rights_are_limited_to_one_namespace() -> None:
    """Leases where the replicas are, ConfigMaps where the health daemon writes."""
    objects = render()
    leader = find(objects, "Role", "fenka-scheduler-leader")
    health = find(objects, "Role", "fenka-scheduler-health")
    assert leader["metadata"]["namespace"] == "gpu"
    assert leader["rules"][1]["resourceNames"] == ["fenka-scheduler"]
    assert health["metadata"]["namespace"] == "kube-system"


def terms(workload: Json) -> list[Json]:
    """The alternatives of its node affinity."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    alternatives: list[Json] = pod_of(workload)["affinity"]["nodeAffinity"][required][
        "nodeSelectorTerms"
    ]
    return alternatives


@needs_helm
def test_node_program_runs_on_labelled_nodes_unless_all_nodes_is_set() -> None:
    """Any of the labels, whatever it says: `false` turns sharing off and the exclusive plugin on."""
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
    """What running pods have of it is on the node."""
    pod = pod_of(find(render(), "DaemonSet", "fenka-node"))
    (container,) = pod["containers"]
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    # The runtime finds them on the node by the paths that the program knows.
    for name in ("cdi", "run", "state"):
        assert paths[name] == mounts[name]
    (run,) = (mount for mount in container["volumeMounts"] if mount["name"] == "run")
    assert run["mountPropagation"] == "Bidirectional"
    assert pod["hostPID"] is True


@needs_helm
def test_simulated_cards_are_not_restarted_when_fenka_is_upgraded() -> None:
    """Their DaemonSet waits for OnDelete, and each node has one node program."""
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
    """As the file to paste has them."""
    written = yaml.safe_load((CHART / "files" / "scheduler-config.yaml").read_text())
    (extender,) = written["extenders"]
    assert isinstance(extender, dict)
    return extender


@needs_helm
def test_second_scheduler_calls_the_same_extender_when_enabled() -> None:
    """By the Service's name, otherwise as in the file to paste."""
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
    """What no node counts is ignored by kube-scheduler itself."""
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
    """Whole cards are also had on nodes that fenka does not serve: kube-scheduler orders those pods."""
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
        assert (json.dumps(name) in conditions["asks-for-a-card"]) == (
            hami or name not in nvidia.HAMI_ONLY
        )
    assert '"nvidia.com/gpu"' not in conditions["asks-for-a-card"]
    assert '["default-scheduler","fenka"]' in conditions["kube-scheduler-places-it"]
    assert QUEUE_GATE in policy["mutations"][0]["applyConfiguration"]["expression"]
    assert policy["failurePolicy"] == "Ignore"


@needs_helm
def test_queue_options_are_left_out_when_values_come_from_an_older_release() -> None:
    """`helm upgrade --reuse-values` knows nothing of values that came later."""
    older = {"scheduler.order": {"halfLifeSeconds": None, "gate": None, "schedulerNames": None}}
    (container,) = pod_of(find(render(**older), "Deployment", "fenka-scheduler"))["containers"]
    assert not [argument for argument in container["args"] if argument.startswith("--half-life")]
    (container,) = pod_of(find(render(), "Deployment", "fenka-scheduler"))["containers"]
    assert "--half-life=3600" in container["args"]


@needs_helm
def test_gate_policy_is_absent_when_the_api_is_missing_or_the_value_is_off() -> None:
    """Kubernetes before 1.36."""
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
    """Word for word."""
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    assert (CHART / "files" / "scheduler-config.yaml").read_text() in guide


def read_dashboard() -> Json:
    """As it is in the chart."""
    board: Json = json.loads((CHART / "files" / "dashboard.json").read_text())
    return board


def test_dashboard_queries_cover_pods_and_cards() -> None:
    """Scenario S1, 8: memory used and allowed and utilisation of pods; temperature, power of cards."""
    shown = " ".join(
        target["expr"] for panel in read_dashboard()["panels"] for target in panel["targets"]
    )
    for metric in (
        "fenka_container_gpu_memory_used_bytes",
        "fenka_container_gpu_memory_limit_bytes",
        "fenka_container_gpu_utilization_ratio",
        "fenka_card_temperature_celsius",
        "fenka_card_power_watts",
    ):
        assert metric in shown


@needs_helm
def test_monitors_honor_labels_when_enabled() -> None:
    """Else Prometheus puts the scraped pod's name where the measured pod's should be."""
    made = render(**{"serviceMonitor.enabled": True, "node.metrics.enabled": True})
    ends = [
        end
        for document in made
        for kind in ("endpoints", "podMetricsEndpoints")
        for end in document.get("spec", {}).get(kind, [])
    ]
    assert [end["honorLabels"] for end in ends] == [True, True]


@needs_helm
@pytest.mark.parametrize(
    "wrong",
    [
        {"node.unit": "GB"},
        {"scheduler.policy": "best"},
        {"scheduler.replica": 3},
        {"simulatedCards": [{"spec": "T4"}]},
        {"node.overLimit": "kill"},
    ],
    ids=str,
)
def test_schema_rejects_values_when_they_are_invalid(wrong: Json) -> None:
    """The schema says what is wrong before anything is installed."""
    given = [f"--set-json={key}={json.dumps(value)}" for key, value in wrong.items()]
    done = helm("template", "fenka", str(CHART), *given)
    assert done.returncode != 0
    assert "schema" in done.stderr


@needs_helm
def test_replicas_are_replaced_and_drained_one_at_a_time() -> None:
    """Both are ready, whoever leads; one alone stays until its successor is ready, and never bars a drain."""
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
    """The spec of an admission policy of the chart."""
    spec: Json = find(render(**values), "ValidatingAdmissionPolicy", f"fenka-{name}")["spec"]
    return spec


def variable(spec: Json, name: str) -> Any:
    """What an admission policy's variable lists."""
    (expression,) = (entry["expression"] for entry in spec["variables"] if entry["name"] == name)
    return json.loads(expression)


@needs_helm
@pytest.mark.parametrize("hami", [False, True])
def test_admission_policy_protects_every_record_of_the_dialects(hami: bool) -> None:
    """The names are the code's own; of HAMi's only where HAMi itself is not at work."""
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
    """For example the former plugin's account, while a cluster is moved."""
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
    """Or where the API server does not know them."""

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
