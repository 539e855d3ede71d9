"""`fenka why POD`: what keeps a pod waiting, and what would help."""

import json
from pathlib import Path
from typing import Any

from tests.builders import node, notebooks, pod, sharing, units, unschedulable
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, Json, in_thread

GOLDEN = Path(__file__).parent / "golden"


def ask(server: FakeApiServer, folder: Path, *arguments: str) -> str:
    """What `fenka why` prints."""
    with in_thread(server, folder) as kubeconfig:
        result = fenka("why", *arguments, "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def data(server: FakeApiServer, folder: Path, *arguments: str) -> dict[str, Any]:
    """The same as data."""
    answer: dict[str, Any] = json.loads(ask(server, folder, *arguments, "-o", "json"))
    return answer


def test_screen_is_complete_when_a_fourth_notebook_is_pending(tmp_path: Path) -> None:
    """The whole screen of scenario S1's fourth pod."""
    message = (
        "0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem. preemption: 0/2 nodes are "
        "available: 2 No preemption victims found for incoming pod."
    )
    event = {
        "metadata": {
            "name": "e",
            "namespace": "default",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "involvedObject": {"name": "notebook-4", "uid": "u-default-notebook-4"},
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": message,
    }
    server = FakeApiServer.of(
        nodes=[sharing("gpu-1"), node("master")],
        pods=[*notebooks("gpu-1"), pod("notebook-4", units(4), status=unschedulable(message))],
        events=[event],
    )
    assert ask(server, tmp_path, "notebook-4", "-n", "default") == (GOLDEN / "why.txt").read_text()


def waiting(count: int = 4, **given: Any) -> Json:
    """The pod that is asked about."""
    return pod("p", units(count), **given)


def test_screen_says_once_when_a_pod_requests_in_two_dialects(tmp_path: Path) -> None:
    """The whole screen says it in one place."""
    both = waiting()
    both["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = "10"
    screen = ask(FakeApiServer.of(nodes=[sharing("a")], pods=[both]), tmp_path, "default/p")
    assert screen.count("which do not go together") == 1
    assert "What helps:\n  - it can never start as it is: it asks for aliyun.com/gpu-mem" in screen


def test_nodes_share_a_line_when_their_reasons_are_equal(tmp_path: Path) -> None:
    """Nodes with the same reason are counted."""
    nodes = [sharing(f"n{number}", 2) for number in range(5)]
    screen = ask(FakeApiServer.of(nodes=nodes, pods=[waiting()]), tmp_path, "default/p")
    assert "n0, n1, n2 and 2 more  card 0: too little memory (2 of 2 units free)" in screen


def test_namespace_is_the_contexts_when_none_is_named(tmp_path: Path) -> None:
    """As kubectl: the context's namespace, unless one is named."""
    server = FakeApiServer.of(nodes=[sharing("a")], pods=[waiting(namespace="team")])
    assert data(server, tmp_path, "p")["namespace"] == "team"


def test_error_is_the_api_servers_when_the_pod_does_not_exist(tmp_path: Path) -> None:
    """The API server's own sentence."""
    with in_thread(FakeApiServer.of(), tmp_path) as kubeconfig:
        result = fenka("why", "nobody", "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 1
    assert result.stderr == 'fenka: pods "nobody" not found\n'
