"""Render the Helm chart in tests, and find objects in the result."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def names_of(objects: list[Json], *kinds: str) -> set[str]:
    """Return the names of the objects of these kinds."""
    return {document["metadata"]["name"] for document in objects if document["kind"] in kinds}


def arguments(objects: list[Json]) -> list[str]:
    """Return the extender's arguments."""
    (container,) = pod_of(find(objects, "Deployment", "fenka-scheduler"))["containers"]
    args: list[str] = container["args"]
    return args


def terms(workload: Json) -> list[Json]:
    """Return the alternatives of a workload's node affinity."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    alternatives: list[Json] = pod_of(workload)["affinity"]["nodeAffinity"][required][
        "nodeSelectorTerms"
    ]
    return alternatives


def extenders() -> Json:
    """Return the extender of the scheduler configuration that users paste."""
    written = yaml.safe_load((CHART / "files" / "scheduler-config.yaml").read_text())
    (extender,) = written["extenders"]
    assert isinstance(extender, dict)
    return extender


ADMISSION = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
