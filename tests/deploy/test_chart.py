"""Test the workloads that the Helm chart renders, and the values that it rejects."""

import json
import subprocess
import sys

import pytest
import yaml

from fenka.dialects import nvidia, nvidia_mig
from fenka.dialects.registry import WITH_HAMI
from tests.deploy.chart import (
    CHART,
    ROOT,
    T4,
    Json,
    extenders,
    find,
    helm,
    names_of,
    needs_helm,
    pod_of,
    render,
    terms,
)


@needs_helm
def test_chart_has_no_lint_warnings_when_every_option_is_on() -> None:
    """Lint the default values and all options."""
    everything = [
        "secondScheduler.enabled=true",
        "serviceMonitor.enabled=true",
        "grafana.dashboard=true",
        "dashboard.page.enabled=true",
        "node.metrics.enabled=true",
        "networkPolicy.enabled=true",
        "users.scaledObjects=true",
    ]
    for options in ([], [f"--set={setting}" for setting in everything]):
        done = helm("lint", "--strict", str(CHART), *options)
        assert done.returncode == 0, done.stdout


@needs_helm
def test_values_of_the_former_metrics_adapter_are_ignored() -> None:
    """An upgrade with --reuse-values has them. Helm removes what the earlier chart created."""
    former = {"enabled": True, "replicas": 2, "nodeSelector": {"a": "b"}, "resources": {}}
    assert render(metricsAdapter=former) == render()
    assert "APIService" not in {item["kind"] for item in render(metricsAdapter=former)}


@needs_helm
def test_every_pod_is_kept_on_linux_when_a_cluster_has_other_nodes() -> None:
    """There is no image for other systems: a pod there would never start. Values may say more."""
    selector = {"nodeSelector": {"pool": "infra"}}
    objects = render(
        scheduler=selector,
        secondScheduler={"enabled": True, **selector},
        dashboard={"page": {"enabled": True}},
        simulatedCards=[T4],
    )
    kinds = {"Deployment", "DaemonSet", "Job", "Pod"}
    pods = [
        item if item["kind"] == "Pod" else item["spec"]["template"]
        for item in objects
        if item["kind"] in kinds
    ]
    assert len(pods) > 4
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
    scheduler = pod_of(find(objects, "Deployment", "fenka-scheduler"))
    assert scheduler["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "infra"}


@needs_helm
@pytest.mark.parametrize("architecture", ["", "arm64"])
def test_pods_are_kept_on_the_images_processors_when_a_value_names_them(architecture: str) -> None:
    """An image for one processor ends at once on nodes with another."""
    objects = render(
        image={"architecture": architecture},
        dashboard={"page": {"enabled": True}},
        simulatedCards=[T4],
    )
    pods = [
        item["spec"]["template"]["spec"]
        for item in objects
        if item["kind"] in {"Deployment", "DaemonSet", "Job"}
    ]
    assert len(pods) > 3
    named = {pod["nodeSelector"].get("kubernetes.io/arch", "") for pod in pods}
    assert named == {architecture}


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


@needs_helm
def test_configurations_evaluate_every_node_when_there_are_more_than_a_hundred() -> None:
    """By default kube-scheduler stops early, and a pod that fits only on the last node stays pending."""
    second = find(
        render(**{"secondScheduler.enabled": True}), "ConfigMap", "fenka-second-scheduler"
    )
    pasted = (CHART / "files" / "scheduler-config.yaml").read_text()
    for text in (second["data"]["config.yaml"], pasted):
        configuration = yaml.safe_load(text)
        (profile,) = configuration["profiles"]
        assert profile["percentageOfNodesToScore"] == 100
        assert "percentageOfNodesToScore" not in configuration, "other profiles keep their own"
    page = ROOT / "docs" / "reference" / "kube-scheduler.md"
    assert "percentageOfNodesToScore: 100" in page.read_text()


@needs_helm
@pytest.mark.parametrize("tls", [True, False])
def test_kube_schedulers_configuration_is_in_a_config_map(tls: bool) -> None:
    """The file in the guide is that of the default values."""
    objects = render(**{"scheduler.tls.enabled": tls, "scheduler.service.nodePort": 31000})
    text = find(objects, "ConfigMap", "fenka-kube-scheduler")["data"]["config.yaml"]
    configured = yaml.safe_load(text)
    expected = yaml.safe_load((CHART / "files" / "scheduler-config.yaml").read_text())
    (extender,) = configured["extenders"]
    scheme = "https" if tls else "http"
    assert extender["urlPrefix"] == f"{scheme}://127.0.0.1:31000/gpushare-scheduler"
    assert ("tlsConfig" in extender) is tls
    assert extender["managedResources"] == expected["extenders"][0]["managedResources"]
    assert {**configured, "extenders": []} == {**expected, "extenders": []}
    second = names_of(render(**{"secondScheduler.enabled": True}), "ConfigMap")
    assert "fenka-kube-scheduler" not in second


@needs_helm
def test_notes_are_three_steps() -> None:
    """Whoever installs the chart reads them on one screen."""
    done = helm("install", "fenka", str(CHART), "--namespace", "gpu", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:\n")[2]
    assert [line[:2] for line in notes.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3."]
    assert len(notes.splitlines()) <= 35
    assert "get configmap fenka-kube-scheduler" in notes


@needs_helm
def test_node_program_runs_on_labelled_nodes_unless_all_nodes_is_set() -> None:
    """Any value of a label counts: `false` turns sharing off and the exclusive plugin on."""
    alternatives = terms(find(render(), "DaemonSet", "fenka-node"))
    assert [term["matchExpressions"] for term in alternatives] == [
        [{"key": "gpushare", "operator": "Exists"}],
        [{"key": "cgpu", "operator": "Exists"}],
        [{"key": "nvidia-device-enable", "operator": "Exists"}],
        [{"key": "ack.node.gpu.schedule", "operator": "Exists"}],
        [{"key": "fenka.io/mig", "operator": "Exists"}],
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
def test_relay_outlives_the_node_program_and_has_no_right_but_its_files() -> None:
    """It is a sidecar, which starts before the program and ends after it, without the API server."""
    pod = pod_of(find(render(), "DaemonSet", "fenka-node"))
    (program,), (relay,) = pod["containers"], pod["initContainers"]
    assert relay["restartPolicy"] == "Always"
    assert relay["image"] == program["image"]
    assert "--relay=/run/fenka-relay" in program["args"]
    assert relay["args"] == ["plugin-relay", "--directory=/run/fenka-relay"]
    shared = {mount["name"]: mount["mountPath"] for mount in relay["volumeMounts"]}
    assert set(shared) == {"device-plugins", "relay", "state"}
    assert (
        shared.items()
        <= {mount["name"]: mount["mountPath"] for mount in program["volumeMounts"]}.items()
    )
    assert relay["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in relay["securityContext"]


@needs_helm
def test_node_program_sees_device_files_of_instances_that_appear_while_it_runs() -> None:
    """A privileged container has the device files that existed when it started; simulated cards have none."""
    objects = render(simulatedCards=[T4])
    mounted = []
    for name in ("fenka-node", "fenka-node-simulated-0"):
        pod = pod_of(find(objects, "DaemonSet", name))
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        paths = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
        assert mounts.get("capabilities") == paths.get("capabilities")
        mounted.append(mounts.get("capabilities"))
    assert mounted == ["/dev/nvidia-caps", None]


@needs_helm
def test_layouts_are_mounted_when_values_name_their_config_map() -> None:
    """As a directory, so that the node program reads changes."""
    for values, expected in (
        ({}, None),
        ({"node.mig": None}, None),
        ({"node.mig.config": "x"}, "x"),
    ):
        pod = pod_of(find(render(**values), "DaemonSet", "fenka-node"))
        (container,) = pod["containers"]
        (name,) = {each.get("configMap", {}).get("name") for each in pod["volumes"]} - {None} or {
            None
        }
        assert name == expected
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        option = "--mig-config=/etc/fenka/mig/config.yaml"
        assert mounts.get("layouts") == (expected and "/etc/fenka/mig")
        assert (option in container["args"]) == bool(expected)


@needs_helm
def test_programs_accept_every_option_of_the_chart() -> None:
    """Compare the containers' arguments with the programs' help."""
    objects = render(
        **{
            "simulatedCards": [T4],
            "hamiNames": True,
            "node.allNodes": True,
            "node.assumeCdi": True,
            "node.mig.config": "layouts",
            "node.spotNotices": "always",
            "scheduler.bindsFor": ["default-scheduler"],
            "scheduler.read": {"inspect": False, "metrics": False},
            "scheduler.tls.hosts": ["gpu.example.com"],
        }
    )
    workloads = [
        document for document in objects if document["kind"] in ("DaemonSet", "Deployment", "Job")
    ]
    for workload in workloads:
        for container in pod_of(workload)["containers"]:
            command = container["args"][: 2 if container["args"][0] == "sim" else 1]
            help_command = [sys.executable, "-m", "fenka", *command, "--help"]
            known = subprocess.run(help_command, capture_output=True, text=True, check=True).stdout
            options = {
                argument.split("=")[0] for argument in container["args"] if argument[:2] == "--"
            }
            assert not {option for option in options if option not in known}, command


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
    assert simulated["nodeSelector"] == {"kubernetes.io/os": "linux", "fenka.io/simulated": "t4"}
    excluded = {"key": "fenka.io/simulated", "operator": "NotIn", "values": ["t4"]}
    for term in terms(find(objects, "DaemonSet", "fenka-node")):
        assert excluded in term["matchExpressions"]


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
    names = {name for dialect in WITH_HAMI for name in dialect.RESOURCES if name[-1] != "-"}
    # kube-scheduler takes no prefixes.
    names |= set(nvidia_mig.KNOWN_RESOURCES)
    assert managed == {name: name in nvidia.HAMI_ONLY for name in names}


@needs_helm
def test_queue_options_are_left_out_when_values_come_from_an_older_release() -> None:
    """`helm upgrade --reuse-values` does not add values that are new in this release."""
    older = {"scheduler.order": {"halfLifeSeconds": None, "gate": None, "schedulerNames": None}}
    (container,) = pod_of(find(render(**older), "Deployment", "fenka-scheduler"))["containers"]
    assert not [argument for argument in container["args"] if argument.startswith("--half-life")]
    (container,) = pod_of(find(render(), "Deployment", "fenka-scheduler"))["containers"]
    assert "--half-life=3600" in container["args"]


def test_guide_quotes_the_scheduler_configuration_verbatim() -> None:
    """The guide contains the file's text, but for the names of MIG instances."""
    guide = (ROOT / "docs" / "reference" / "kube-scheduler.md").read_text()
    quoted, mark, _ = (
        (CHART / "files" / "scheduler-config.yaml").read_text().partition("    # MIG instances")
    )
    assert mark
    assert quoted in guide


@needs_helm
@pytest.mark.parametrize(
    "invalid",
    [
        {"node.unit": "GB"},
        {"scheduler.policy": "best"},
        {"scheduler.replica": 3},
        {"simulatedCards": [{"spec": "T4"}]},
        {"node.overLimit": "kill"},
        {"node.spotNotices": "sometimes"},
        {"node.mig": {"configs": "layouts"}},
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
def test_chart_names_the_packaged_one_when_jobset_is_enabled_without_it() -> None:
    """JobSet's chart is added by `make chart`."""
    done = helm("template", "fenka", str(CHART), "--set=jobset.enabled=true")
    assert done.returncode != 0
    assert "install that of a release, or the one that `make chart` leaves in dist/" in done.stderr


def test_jobsets_image_has_the_version_of_its_chart() -> None:
    """The chart is that of the Go module, whose own default is an image of the development branch."""
    tag = yaml.safe_load((CHART / "values.yaml").read_text())["jobset"]["image"]["tag"]
    assert f"sigs.k8s.io/jobset {tag} " in (ROOT / "e2e" / "jobset" / "go.mod").read_text()


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


@needs_helm
def test_node_program_finds_drivers_that_are_mounted_later() -> None:
    """The node's root is mounted with what comes after; a configured root of the driver is only an option."""
    for configured in ("", "/run/nvidia/driver"):
        pod = pod_of(find(render(**{"node.driverRoot": configured}), "DaemonSet", "fenka-node"))
        (container,) = pod["containers"]
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "host")
        assert mount == {
            "name": "host",
            "mountPath": "/host",
            "readOnly": True,
            "mountPropagation": "HostToContainer",
        }
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "host")
        assert volume["hostPath"] == {"path": "/", "type": "Directory"}
        options = [word for word in container["args"] if word.startswith("--driver-root")]
        assert options == ([f"--driver-root={configured}"] if configured else [])
    done = helm("template", "fenka", str(CHART), "--set", "node.driverRoot=run/nvidia")
    assert done.returncode != 0
