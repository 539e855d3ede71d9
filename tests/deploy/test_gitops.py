"""The examples of docs/do/gitops.md: what is rendered from their values, with and without a server."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import ADMISSION, CHART, ROOT, Json, helm, names_of, needs_helm

PAGE = (ROOT / "docs" / "do" / "gitops.md").read_text()
BLOCKS = [
    document
    for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for document in yaml.safe_load_all(text)
]


def example(kind: str) -> Json:
    """Return the page's object of a kind."""
    found: Json
    (found,) = (document for document in BLOCKS if document["kind"] == kind)
    return found


VALUES = {
    "Argo CD": example("Application")["spec"]["source"]["helm"]["valuesObject"],
    "Flux": example("HelmRelease")["spec"]["values"],
}


def rendered(folder: Path, values: Json, *options: str) -> list[Json]:
    """Render the chart with values, as `helm template` does on a machine without a cluster."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    done = helm("template", "fenka", str(CHART), "-n", "fenka-system", "-f", str(file), *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@needs_helm
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_examples_render_everything_whatever_is_known_of_the_server(
    tmp_path: Path, values: Json
) -> None:
    """The policies are there for each version that Helm may assume, and as a server would have them."""
    server = ("--api-versions=v1/Pod", f"--api-versions={ADMISSION}")
    objects = rendered(tmp_path, values, "--kube-version=v1.37.0", *server)
    assert names_of(objects, "MutatingAdmissionPolicy") == {
        "fenka-queue-gate",
        "fenka-second-scheduler",
    }
    for version in ("v1.31.0", "v1.37.0", "v1.40.0"):
        assert rendered(tmp_path, values, f"--kube-version={version}") == objects


@needs_helm
def test_rendering_twice_gives_the_same(tmp_path: Path) -> None:
    """Otherwise an installation would never be in sync."""
    everything = {
        "autoscaler": {
            "enabled": True,
            "config": {
                "cluster": "a",
                "provider": {"kind": "simulated"},
                "groups": [{"name": "t4"}],
            },
        },
        "serviceMonitor": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "grafana": {"dashboard": True},
        "openshift": True,
        "simulatedCards": [{"nodeSelector": {"fenka.io/simulated": "t4"}, "spec": "T4"}],
    }
    assert rendered(tmp_path, everything) == rendered(tmp_path, everything)


@needs_helm
def test_openshift_binds_every_account_of_the_chart(tmp_path: Path) -> None:
    """A pod of an account without a constraint would be refused for its user."""
    values = {"openshift": True, "secondScheduler": {"enabled": True}}
    objects = rendered(tmp_path, values)
    bound = {
        subject["name"]: document["roleRef"]["name"]
        for document in objects
        if document["kind"] == "RoleBinding"
        and document["roleRef"]["name"].startswith("system:openshift:scc:")
        for subject in document["subjects"]
    }
    accounts = names_of(objects, "ServiceAccount")
    assert set(bound) == accounts
    assert bound["fenka-node"] == "system:openshift:scc:privileged"
    assert {bound[name] for name in accounts - {"fenka-node"}} == {
        "system:openshift:scc:nonroot-v2"
    }
    assert not [item for item in rendered(tmp_path, {}) if "openshift" in json.dumps(item)]
