"""Test who may call, read and write what in an installation by the chart."""

import json
from typing import Any

import msgspec
import pytest
import yaml

from fenka.cluster import queue_snapshot
from fenka.cluster.autoscaling import ORDERS_MAP, SHAPES_MAP, STATUS_MAP
from fenka.cluster.compact import MAX_CONTAINERS
from fenka.cluster.objects import QUEUE_GATE
from fenka.dialects import nvidia, pod_records, resize_records
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.jobs.kubernetes.checks import ClusterDefaults
from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.reader import PUBLISHED
from tests.deploy.chart import (
    ADMISSION,
    CHART,
    Json,
    arguments,
    extenders,
    find,
    helm,
    names_of,
    needs_helm,
    pod_of,
    render,
)


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
            "networkPolicy.apiServers": nodes,
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
    # Users read the queue through the API server.
    assert (read["ports"], read["from"]) == ([{"port": "http"}], monitoring + nodes)
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
def test_topology_levels_and_policies_reach_the_scheduler() -> None:
    """In their order. Wrong ones are refused before anything is installed."""
    levels = ["topology.kubernetes.io/zone", "rack", "kubernetes.io/hostname"]
    named = arguments(
        render(**{"scheduler.topologyLevels": levels, "scheduler.policy": "bid-price"})
    )
    options = [f"--topology-level={level}" for level in levels]
    assert [option for option in named if option.startswith("--topology-level")] == options
    assert "--policy=bid-price" in named
    assert not [option for option in arguments(render()) if option.startswith("--topology-level")]
    for key, value in {"topologyLevels": ["a b"], "policy": "best"}.items():
        done = helm("template", "x", str(CHART), f"--set-json=scheduler.{key}={json.dumps(value)}")
        assert done.returncode
        assert f"scheduler/{key}" in done.stderr.replace(".", "/")


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
    """Leases are in the replicas' namespace, and ConfigMaps, if the value says so, in the health daemon's."""
    assert "fenka-scheduler-health" not in names_of(render(), "Role", "RoleBinding")
    assert "--unhealthy-maps" not in arguments(render())
    objects = render(**{"scheduler.unhealthyMaps": True})
    assert "--unhealthy-maps" in arguments(objects)
    leader = find(objects, "Role", "fenka-scheduler-leader")
    health = find(objects, "Role", "fenka-scheduler-health")
    assert leader["metadata"]["namespace"] == "gpu"
    assert leader["rules"][1]["resourceNames"] == ["fenka-scheduler"]
    assert health["metadata"]["namespace"] == "kube-system"


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
        if resource["name"] != "nvidia.com/gpu" and "/mig-" not in resource["name"]
    ]
    for name in names:
        assert (json.dumps(name) in conditions["requests-a-card"]) == (
            hami or name not in nvidia.HAMI_ONLY
        )
    assert '"nvidia.com/gpu"' not in conditions["requests-a-card"]
    assert "nvidia.com/mig-" not in conditions["requests-a-card"]
    assert '["default-scheduler","fenka"]' in conditions["placed-by-kube-scheduler"]
    assert QUEUE_GATE in policy["mutations"][0]["applyConfiguration"]["expression"]
    assert policy["failurePolicy"] == "Ignore"


@needs_helm
@pytest.mark.parametrize(
    "options",
    [
        ["--kube-version=v1.35.9-eks-1"],
        ["--set=scheduler.order.gate=false"],
        ["--set=admission.mutatingApi=none"],
        # With a list of the server's kinds, as Argo CD passes it, the version does not count.
        ["--kube-version=v1.37.0", "--api-versions=v1/Pod"],
    ],
    ids=str,
)
def test_gate_policy_is_absent_when_the_api_is_missing_or_the_value_is_off(
    options: list[str],
) -> None:
    """Kubernetes before 1.36 does not have the API; a server may have it off."""
    assert "queue-gate" not in helm("template", "fenka", str(CHART), *options).stdout


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
    keys = {*resize_records.RECORDS, *pod_records.RECORDS}
    keys |= {key for dialect in dialects for key in dialect.RECORDS}
    protected, numbers = variable(spec, "records"), range(MAX_CONTAINERS)
    assert sorted(protected) == sorted(
        name
        for key in keys
        for name in ([f"{key}{number}" for number in numbers] if key.endswith("-") else [key])
    )
    cards = variable(policy("placement", hamiNames=hami), "cards")
    assert sorted(cards) == sorted({name for dialect in dialects for name in dialect.RESOURCES})
    assert resize_records.REQUEST not in protected


@needs_helm
def test_extra_users_may_write_records_when_values_name_them() -> None:
    """For example the former plugin's account during a migration."""
    extra = "system:serviceaccount:kube-system:gpushare"
    spec = policy("records", **{"admission.extraUsers": [extra]})
    condition, kubelets = spec["matchConditions"]
    assert "has(request.subResource) && request.subResource == 'status'" in kubelets["expression"]
    for user in (
        "system:serviceaccount:gpu:fenka-scheduler",
        "system:serviceaccount:gpu:fenka-node",
        extra,
    ):
        assert f'"{user}"' in condition["expression"]


@needs_helm
def test_admission_policy_selects_the_lease_by_the_label_that_readers_use() -> None:
    """Only fenka's own programs write it."""
    spec = policy("lease")
    assert spec["matchConstraints"]["objectSelector"] == {
        "matchLabels": dict([queue_snapshot.LABEL.split("=")])
    }
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["leases"]


@needs_helm
def test_admission_policies_are_bound_unless_switched_off() -> None:
    """Check policies and bindings, and that none is rendered when they are off."""
    no_gate = {"scheduler.order.gate": False}

    def kinds(objects: list[Json]) -> list[str]:
        return [
            document["kind"]
            for document in objects
            if document["kind"].startswith("ValidatingAdmission")
        ]

    assert kinds(render(**no_gate)) == [
        *["ValidatingAdmissionPolicy"] * 9,
        *["ValidatingAdmissionPolicyBinding"] * 9,
    ]
    for document in render(**no_gate):
        if document["kind"] == "ValidatingAdmissionPolicyBinding":
            assert document["spec"]["validationActions"] == ["Deny"]
            assert document["spec"]["policyName"] == document["metadata"]["name"]
    assert kinds(render(**no_gate, **{"admission.enabled": False})) == []


@needs_helm
def test_users_may_do_what_commands_about_jobs_do() -> None:
    """Secrets are created and never read."""
    role = find(render(), "ClusterRole", "fenka-user")
    rights = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for root in (("batch", "jobs"), ("jobset.x-k8s.io", "jobsets"), ("apps", "deployments")):
        assert rights[root] == {"get", "list", "watch", "create", "patch", "delete"}
    assert rights["", "secrets"] == rights["", "configmaps"] == {"create"}
    assert role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"


@needs_helm
def test_users_may_grant_gateways_what_they_may_do_themselves() -> None:
    """The API server refuses a Role with rights that its creator lacks."""
    role = find(render(), "ClusterRole", "fenka-user")
    held = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    spec = ServiceSpec(name="bert", restful_port=80)
    gateway = render_gateway(spec, "team", GatewaySettings("fenka"), ["v1"])
    for rule in find(gateway, "Role", "bert-gateway")["rules"]:
        for resource in rule["resources"]:
            assert {(rule["apiGroups"][0], resource, verb) for verb in rule["verbs"]} <= held


@needs_helm
def test_users_have_rights_on_kedas_objects_only_when_the_value_says_so() -> None:
    """A ScaledObject may use credentials of the whole cluster."""

    def groups(**values: Any) -> set[str]:
        rules = find(render(**values), "ClusterRole", "fenka-user")["rules"]
        return {group for rule in rules for group in rule["apiGroups"]}

    assert "keda.sh" not in groups()
    assert "keda.sh" not in groups(users={"scaledObjects": None})
    assert "keda.sh" in groups(users={"scaledObjects": True})


@needs_helm
def test_users_find_the_gateways_image_when_the_chart_publishes_it() -> None:
    """Commands read the ConfigMap at a fixed place."""
    objects = render(image={"repository": "registry/fenka", "tag": "7"})
    published = find(objects, "ConfigMap", "fenka")
    meta = published["metadata"]
    assert f"/namespaces/{meta['namespace']}/configmaps/{meta['name']}" in PUBLISHED
    assert published["data"] == {
        "gatewayImage": "registry/fenka:7",
        "gatewayPullPolicy": "IfNotPresent",
        "namespace": "gpu",
        "priorityClass": "fenka-serving",
        "screens": "gpu/fenka-scheduler-read:http",
    }
    digest = f"sha256:{'0' * 64}"
    pinned = find(render(image={"digest": digest}), "ConfigMap", "fenka")["data"]["gatewayImage"]
    assert pinned.startswith("fenka:")
    assert pinned.endswith(f"@{digest}")
    without = find(render(users={"priorityClasses": False}), "ConfigMap", "fenka")
    assert "priorityClass" not in without["data"]
    (rule,) = find(objects, "Role", "fenka")["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (["fenka"], ["get"])


@needs_helm
def test_viewers_may_only_read_what_screens_show() -> None:
    """Nobody has the role until an operator binds it."""
    objects = render()
    rules = find(objects, "ClusterRole", "fenka-viewer")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list"}
    (of_maps,) = [rule for rule in rules if rule["resources"] == ["configmaps"]]
    names = [STATUS_MAP, ORDERS_MAP, SHAPES_MAP, "fenka-autoscaler-config"]
    assert of_maps["resourceNames"] == names
    assert not [each for each in objects if each.get("roleRef", {}).get("name") == "fenka-viewer"]
    assert "fenka-viewer" not in names_of(render(users={"role": False}), "ClusterRole")


@needs_helm
def test_queue_role_only_reads_the_port_that_shows_no_variables() -> None:
    """The ConfigMap for users names the Service as the role does."""
    objects = render()
    (rule,) = find(objects, "ClusterRole", "fenka-queue")["rules"]
    namespace, _, service = find(objects, "ConfigMap", "fenka")["data"]["screens"].partition("/")
    assert (rule["resources"], rule["verbs"]) == (["services/proxy"], ["get"])
    assert rule["resourceNames"] == [service]
    name, _, port = service.partition(":")
    read = find(objects, "Service", name)
    assert (read["metadata"].get("namespace", namespace), read["spec"]["ports"][0]["name"]) == (
        namespace,
        port,
    )
    closed = render(**{"scheduler.read.inspect": False})
    assert "fenka-queue" not in names_of(closed, "ClusterRole")
    assert "screens" not in find(closed, "ConfigMap", "fenka")["data"]


@needs_helm
def test_priority_classes_order_services_before_jobs_before_backfill() -> None:
    """Test that priority classes order services before jobs before backfill."""
    objects = render()
    serving = find(objects, "PriorityClass", "fenka-serving")
    backfill = find(objects, "PriorityClass", "fenka-backfill")
    assert (serving["value"], backfill["value"]) == (1000, -1000)
    assert not names_of(render(users={"priorityClasses": False}), "PriorityClass")
    assert "fenka-user" not in names_of(render(users={"role": False}), "ClusterRole")


@needs_helm
def test_defaults_of_options_are_published_when_the_administrator_gives_some() -> None:
    """Jobs go to the second scheduler, where there is one: the other one does not know fenka."""

    def published(**values: Any) -> object:
        text = find(render(**values), "ConfigMap", "fenka")["data"].get("defaults")
        return text and json.loads(text)

    assert published() is None
    second = {"enabled": True, "schedulerName": "gpu"}
    assert published(secondScheduler=second) == {"scheduler": "gpu"}
    given = {"defaults": {"scheduler": "own", "toleration": ["nvidia.com/gpu"], "run-as": "1000"}}
    assert published(secondScheduler=second, users=given) == given["defaults"]
    written = json.loads(json.dumps(given["defaults"]))
    assert msgspec.convert(written, ClusterDefaults).run_as == "1000"
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["users"]["properties"]["defaults"]["properties"]
    assert {*known} == {field.encode_name for field in msgspec.structs.fields(ClusterDefaults)}


@needs_helm
def test_grace_of_pods_with_cards_is_bounded_by_the_value() -> None:
    """Both when a pod is created or deleted, and when it is evicted."""
    spec = policy("grace", **{"admission.maxGraceSeconds": 90})
    assert spec["matchConstraints"]["resourceRules"][0]["operations"] == ["CREATE", "DELETE"]
    most = next(it for it in spec["variables"] if it["name"] == "most")
    assert most["expression"].endswith(": 90")
    eviction = policy("eviction-grace", **{"admission.maxGraceSeconds": 90})
    of_fenka, longest, of_tenants = eviction["validations"]
    assert "fenka-scheduler" in of_fenka["expression"]
    assert "fenka-node" in of_fenka["expression"]
    assert longest["expression"].endswith("<= 90")
    assert of_tenants["expression"].endswith("<= 30 || variables.drains")


@needs_helm
def test_policies_have_their_defaults_when_values_come_from_an_older_release() -> None:
    """Otherwise each pod with cards, and each service, would be refused."""
    older = {"admission.maxGraceSeconds": None, "scheduler.order.schedulerNames": None}
    most = next(it for it in policy("grace", **older)["variables"] if it["name"] == "most")
    assert most["expression"].endswith(": 3600")
    _, scheduler = policy("preemption", **older)["validations"]
    assert scheduler["expression"] == 'object.spec.schedulerName in ["default-scheduler"]'


@needs_helm
def test_node_program_ends_overdue_programs_unless_the_value_is_off() -> None:
    """A value of the chart."""

    def options(**values: Any) -> list[str]:
        daemon_set = find(render(**values), "DaemonSet", "fenka-node")
        found: list[str] = pod_of(daemon_set)["containers"][0]["args"]
        return found

    assert "--no-end-overdue" not in options()
    assert "--no-end-overdue" not in options(**{"node.endOverdue": None})
    assert "--no-end-overdue" in options(**{"node.endOverdue": False})


@needs_helm
def test_node_program_keeps_its_taint_unless_the_value_is_off() -> None:
    """Values of a release without it mean the default. It may write no other taint."""

    def switched_off(**values: Any) -> bool:
        daemon_set = find(render(**values), "DaemonSet", "fenka-node")
        return "--no-free-cards-taint" in pod_of(daemon_set)["containers"][0]["args"]

    assert not switched_off()
    assert not switched_off(**{"node.freeCardsTaint": None})
    assert switched_off(**{"node.freeCardsTaint": False})


@needs_helm
def test_dashboard_reads_and_is_reached_by_port_forwarding_only() -> None:
    """Without a Service, on loopback, as an unprivileged user; its roles read only, and no secrets."""
    page = {"enabled": True, "prometheus": "http://prometheus:9090", "clusterName": "lab two"}
    values = {"page": page}
    objects = render(dashboard=values)
    (container,) = pod_of(find(objects, "Deployment", "fenka-dashboard"))["containers"]
    assert container["args"] == [
        "dashboard",
        "--cluster",
        "--auth=none",
        "--port=8250",
        "--cluster-name=lab two",
        "--prometheus=http://prometheus:9090",
    ]
    assert "ports" not in container
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    named = [item for item in objects if item["metadata"]["name"] == "fenka-dashboard"]
    assert {item["kind"] for item in named} == {
        *("ServiceAccount", "Deployment"),
        *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    }
    verbs = {verb for item in named for rule in item.get("rules", ()) for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch"}
    resources = {
        resource
        for item in named
        for rule in item.get("rules", ())
        for resource in rule["resources"]
    }
    assert not resources & {"secrets", "pods/log", "pods/exec"}
    assert not [item for item in render() if item["metadata"]["name"] == "fenka-dashboard"]


@needs_helm
def test_usage_is_recorded_on_a_volume_when_it_is_enabled() -> None:
    """One pod at a time, since the file has one writer. The published name leads readers to it."""
    usage = {"enabled": True, "prices": {"Tesla T4": 0.35}, "currency": "EUR"}
    objects = render(dashboard={"page": {"enabled": True, "usage": usage}})
    deployment = find(objects, "Deployment", "fenka-dashboard")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = pod_of(deployment)
    (container,) = pod["containers"]
    assert container["args"][4:] == [
        "--usage-file=/var/lib/fenka/usage/usage.db",
        "--usage-size=200MiB",
        "--usage-port=8251",
        "--currency=EUR",
        "--team-label=fenka.io/team",
        "--price=Tesla T4=0.35",
    ]
    claim = find(objects, "PersistentVolumeClaim", "fenka-dashboard-usage")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert pod["volumes"] == [
        {"name": "usage", "persistentVolumeClaim": {"claimName": "fenka-dashboard-usage"}}
    ]
    assert pod["securityContext"]["fsGroup"] == 65532
    service = find(objects, "Service", "fenka-dashboard-usage")
    (port,) = service["spec"]["ports"]
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": port["port"]}]
    published = find(objects, "ConfigMap", "fenka")["data"]["usage"]
    assert published == "gpu/fenka-dashboard-usage:http"
    (rule,) = find(objects, "ClusterRole", "fenka-usage")["rules"]
    assert rule["resourceNames"] == [f"fenka-dashboard-usage:{port['name']}"]


@needs_helm
def test_usage_has_the_volume_that_is_named() -> None:
    """A claim, or any volume; then no claim is made. A release from before has nothing of it."""
    for given, volume in (
        ({"existingClaim": "own"}, {"persistentVolumeClaim": {"claimName": "own"}}),
        ({"volume": {"emptyDir": {}}}, {"emptyDir": {}}),
    ):
        objects = render(dashboard={"page": {"enabled": True, "usage": {"enabled": True, **given}}})
        pod = pod_of(find(objects, "Deployment", "fenka-dashboard"))
        assert pod["volumes"] == [{"name": "usage", **volume}]
        assert "PersistentVolumeClaim" not in {item["kind"] for item in objects}
    without = render(dashboard={"page": {"enabled": True, "usage": None}})
    assert "usage" not in find(without, "ConfigMap", "fenka")["data"]


@needs_helm
@pytest.mark.parametrize("auth", ["kubernetes", "proxy"])
def test_page_has_a_service_and_may_ask_who_looks_when_people_sign_in(auth: str) -> None:
    """Only then it listens beyond its pod. It may create reviews, which store nothing, and nothing else."""
    page = {"enabled": True, "auth": auth, "hosts": ["gpu.example.com"], "proxySecret": "known"}
    objects = render(dashboard={"page": page})
    pod = pod_of(find(objects, "Deployment", "fenka-dashboard"))
    (container,) = pod["containers"]
    assert container["args"][2:6] == [
        *(f"--auth={auth}", "--port=8250", "--listen=0.0.0.0", "--host=gpu.example.com")
    ]
    (port,) = find(objects, "Service", "fenka-dashboard")["spec"]["ports"]
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": 8250}]
    created = {
        resource
        for rule in find(objects, "ClusterRole", "fenka-dashboard")["rules"]
        for resource in rule["resources"]
        if "create" in rule["verbs"]
    }
    reviews = {"subjectaccessreviews"}
    assert created == (reviews | {"tokenreviews"} if auth == "kubernetes" else reviews)
    secrets = [volume["secret"]["secretName"] for volume in pod.get("volumes", ())]
    assert secrets == (["known"] if auth == "proxy" else [])
    assert ("--proxy-secret=/etc/fenka/proxy/secret" in container["args"]) == (auth == "proxy")


@needs_helm
def test_programs_send_spans_when_a_collector_is_named() -> None:
    """The scheduler, the nodes and, by what is published, gateways of new services; otherwise none."""
    for endpoint in ("", "http://collector:4318"):
        objects = render(tracing={"endpoint": endpoint})
        workloads = [
            item
            for item in objects
            if item["metadata"]["name"] in ("fenka-scheduler", "fenka-node")
        ]
        arguments = [
            pod_of(item)["containers"][0]["args"]
            for item in workloads
            if item["kind"] in ("Deployment", "DaemonSet")
        ]
        assert len(arguments) == 2
        assert all(
            ("--traces=http://collector:4318" in given) == bool(endpoint) for given in arguments
        )
        assert find(objects, "ConfigMap", "fenka")["data"].get("traces", "") == endpoint
