"""Run three notebooks on one T4, first exclusively, then shared (TensorFlow and Jupyter on cGPU)."""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.installation import HERE, MEMORY, WHOLE, Installation, deployment, notebook

NODE = "sd-cluster-04"
NOTEBOOKS = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")
CAP_MIB = 15079 * 4 // 14
OUT_OF_MEMORY = 2


@pytest.fixture
def node(installation: Installation) -> Iterator[str]:
    """Provide the article's only GPU node; the other node is not labelled, so it offers nothing."""
    installation.label("sd-cluster-05", "gpushare-", "cgpu-")
    installation.label(NODE, "gpushare-", "cgpu=false")
    installation.wait_for_allocatable(NODE, MEMORY, 0)
    installation.cluster.kubectl(
        "create", "configmap", "notebook", f"--from-file={HERE / 'notebook.py'}"
    )
    yield NODE
    installation.cluster.kubectl("delete", "deployment,service,configmap,pod", "--all", "--now")
    installation.label(NODE, "cgpu-")


def cell(installation: Installation, name: str, path: str, **query: str | int) -> Any:
    """Run a cell of a notebook through its Service."""
    service = installation.cluster.get("service", name)
    address = service["spec"]["clusterIP"]
    url = f"http://{address}/{path}?{urlencode({'password': 'mypassw0rd', **query})}"
    return json.loads(installation.cluster.fetch(url))


def test_second_pod_stays_pending_when_cards_are_not_shared(
    installation: Installation, node: str
) -> None:
    """Two replicas request a whole card each: one runs, one is pending with Kubernetes' own message."""
    installation.wait_for_allocatable(node, WHOLE, 1)
    installation.cluster.apply(deployment("tf-notebook", WHOLE, 1, replicas=2))
    (running,) = installation.wait_for_running("tf-notebook", 1)
    (waiting,) = [pod for pod in installation.pods("tf-notebook") if pod != running]
    name = waiting["metadata"]["name"]
    message = installation.wait_for_event(name, "Insufficient nvidia.com/gpu")
    assert message.startswith("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    total = installation.fenka("top", "node")
    assert re.search(rf"^{node} +192\.168\.1\.214 +<none> +ready +1 +1\b", total, re.MULTILINE), (
        total
    )
    assert "1/1 (100%)" in total


@pytest.mark.versions
def test_fourth_notebook_stays_pending_when_three_share_the_card(
    installation: Installation, node: str
) -> None:
    """Follow the article, from the label to the fourth notebook, which starts when a card has room."""
    installation.label(node, "cgpu=true")
    installation.wait_for_allocatable(node, MEMORY, 14)
    installation.wait_for_allocatable(node, WHOLE, 0)

    for name in NOTEBOOKS:
        installation.cluster.apply(notebook(name, 4))
    pods = {name: installation.wait_for_running(name, 1)[0] for name in NOTEBOOKS}
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == {node}

    # Each sees and may use 15079 MiB x 4/14 = 4308 MiB.
    for name in NOTEBOOKS:
        copied = partial(cell, installation, name, "copy")
        wait_until(f"{name} answers", lambda copied=copied: copied()["same"])  # type: ignore[misc]
        memory = cell(installation, name, "memory")
        assert memory["cuda"]["total"] == memory["nvml"]["total"] == CAP_MIB
    environment = cell(installation, "tf-notebook", "environment")
    assert environment["ALIYUN_COM_GPU_MEM_DEV"] == "14"
    assert environment["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4"

    # One fills its slice and cannot allocate more; the others are not affected.
    free = cell(installation, "tf-notebook", "memory")["cuda"]["free"]
    assert cell(installation, "tf-notebook", "allocate", mib=free)["result"] == 0
    assert cell(installation, "tf-notebook", "allocate", mib=4)["result"] == OUT_OF_MEMORY
    for name in NOTEBOOKS[1:]:
        assert cell(installation, name, "copy")["same"]
        free = cell(installation, name, "memory")["cuda"]["free"]
        assert cell(installation, name, "allocate", mib=free)["result"] == 0

    # The screens.
    shared = installation.fenka("top", "node", "-s").splitlines()
    assert shared[0].split() == ["NAME", "IPADDRESS", "GPU0(Allocated/Total)"]
    assert [node, "192.168.1.214", "12/14"] in [line.split() for line in shared]
    assert shared[-2:] == ["Allocated/Total GPU Memory In GPUShare Node:", "12/14 (GiB) (85%)"]
    details = installation.fenka("top", "node", "-s", "-d")
    for pod in pods.values():
        assert re.search(rf"^{pod['metadata']['name']} +default +4", details, re.MULTILINE), details
    assert "12 (85%)" in details

    # The fourth is pending with a reason, and starts when another ends.
    installation.cluster.apply(deployment("tf-notebook-4", MEMORY, 4))
    wait_until("a fourth pod", lambda: len(installation.pods("tf-notebook-4")) == 1)
    (fourth,) = installation.pods("tf-notebook-4")
    name = fourth["metadata"]["name"]
    installation.wait_for_event(name, "Insufficient aliyun.com/gpu-mem")
    installation.wait_for_event(name, "fenka:", "too little memory")
    explanation = installation.fenka("why", name)
    assert "too little memory" in explanation
    installation.cluster.kubectl("delete", "deployment", "tf-notebook-2", "--now")
    installation.wait_for_running("tf-notebook-4", 1)

    # The label becomes false while slices are allocated: running pods keep theirs.
    installation.label(node, "cgpu=false")
    cell(installation, "tf-notebook", "free")
    assert cell(installation, "tf-notebook", "copy")["same"]
    assert installation.allocatable(node, WHOLE) == 0
    installation.cluster.kubectl("delete", "deployment", "--all", "--now")
    installation.wait_for_allocatable(node, MEMORY, 0)
    installation.wait_for_allocatable(node, WHOLE, 1)
