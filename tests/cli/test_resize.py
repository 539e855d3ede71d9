"""`fenka resize POD`: the wish on the pod, and the answer of its node's program."""

from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from fenka.cli import control
from fenka.dialects.resize_records import (
    FINAL,
    REFUSED,
    REQUEST,
    STATUS,
    ResizeStatus,
    encode_status,
)
from tests.builders import pod, units
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, Json, in_thread

Answer = Callable[[str], dict[str, str]]


def answering(answer: Answer, *pods: Json) -> FakeApiServer:
    """Return a server on which a node program answers requests for another size at once."""
    server = FakeApiServer.of(pods=list(pods))

    async def node_program(request: web.Request) -> None:
        if request.method == "PATCH":
            namespace, _, name = request.path.split("/")[-3:]
            annotations = server.get("pods", name, namespace)["metadata"]["annotations"]
            if REQUEST in annotations:
                annotations.update(answer(annotations[REQUEST]))

    server.after = node_program
    return server


def granted(text: str) -> dict[str, str]:
    """What it writes then."""
    return {STATUS: encode_status(ResizeStatus("u-team-a", (), {}, text))}


def run(server: FakeApiServer, folder: Path, *arguments: str) -> tuple[object, str]:
    """Return the exit code and the output."""
    with in_thread(server, folder) as kubeconfig:
        result = fenka("resize", *arguments, "--kubeconfig", str(kubeconfig))
    return result.exit_code, result.stdout + result.stderr.removeprefix("fenka: ").rstrip()


def running(**given: object) -> Json:
    """Pod team/a."""
    return pod("a", units(4), namespace="team", node="n", **given)


@pytest.mark.parametrize(
    ("arguments", "wish"),
    [
        (("a", "--gpu-mem", "6"), "gpu-mem=6"),
        (("team/a", "--gpu-mem", "4096MiB", "--gpu-core", "0"), "gpu-mem=4096MiB,gpu-core=0"),
        (("a", "-n", "team", "-c", "x", "--gpu-core", "40"), "x: gpu-core=40"),
    ],
)
def test_resize_writes_the_request_on_the_pod(
    tmp_path: Path, arguments: tuple[str, ...], wish: str
) -> None:
    """The wish is written on this very pod; what was refused before is taken away."""
    server = answering(granted, running(annotations={REFUSED: "no"}))
    assert run(server, tmp_path, *arguments) == (0, "a: resized\n")
    assert [body for _, body in server.writes] == [
        {
            "metadata": {
                "uid": "u-team-a",
                "annotations": {REQUEST: wish, REFUSED: None, FINAL: None},
            }
        }
    ]


def test_resize_says_that_the_request_stays_when_it_is_refused(tmp_path: Path) -> None:
    """The pod may grow later: the exit code is that of what may succeed another time."""
    server = answering(lambda _: {REFUSED: "card 0 is full"}, running())
    code, said = run(server, tmp_path, "a", "--gpu-mem", "6")
    assert code == 75
    assert said.startswith("card 0 is full; the request stays, and is granted as soon as it fits: ")
    assert server.get("pods", "a", "team")["metadata"]["annotations"][REQUEST] == "gpu-mem=6"


def test_resize_withdraws_the_request_when_it_is_refused_and_may_not_wait(tmp_path: Path) -> None:
    """Nothing grows afterwards."""
    server = answering(lambda _: {REFUSED: "card 0 is full"}, running())
    assert run(server, tmp_path, "a", "--gpu-mem", "6", "--no-wait") == (
        1,
        "card 0 is full; the request is withdrawn",
    )
    assert REQUEST not in server.get("pods", "a", "team")["metadata"]["annotations"]


def test_resize_withdraws_the_request_when_it_can_never_be_granted(tmp_path: Path) -> None:
    """Whatever the sentence is: the node program says by a field that waiting does not help."""
    server = answering(lambda _: {REFUSED: "too large", FINAL: "true"}, running())
    assert run(server, tmp_path, "a", "--gpu-mem", "99") == (
        1,
        "too large; the request is withdrawn",
    )
    assert REQUEST not in server.get("pods", "a", "team")["metadata"]["annotations"]


def test_resize_fails_when_no_node_confirms_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a record of another wish, or of another pod, is no answer."""
    monkeypatch.setattr(control, "WAIT_S", 0.2)
    for record in (
        granted("gpu-mem=5"),
        {STATUS: encode_status(ResizeStatus("u", (), {}, "gpu-mem=6"))},
        {STATUS: "{"},
    ):
        server = answering(lambda _, record=record: record, running())  # type: ignore[misc]
        code, said = run(server, tmp_path, "a", "--gpu-mem", "6")
        assert code == 75
        assert said.endswith("the request stays in annotation fenka.io/resize and will be retried")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("a",), 2, "nothing to change"),
        (("a", "--gpu-mem", "6GB"), 2, "is no unit"),
        (
            ("a", "--gpu-core", "4", "--gpu-core-mode", "soft"),
            2,
            "--gpu-core-mode cannot be changed for a pod",
        ),
        (("b", "--gpu-mem", "6"), 75, "team/b is Pending: only what runs can be resized"),
        (("c", "--gpu-mem", "6"), 1, "not found"),
        (("a", "--gpu-mem", "6", "--local"), 2, "--local selects this machine"),
    ],
)
def test_resize_writes_nothing_when_the_request_is_invalid(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """Nothing is written then."""
    server = answering(granted, running(), pod("b", units(4), namespace="team"))
    found, text = run(server, tmp_path, *arguments)
    assert (found, said in text) == (code, True), text
    assert server.writes == []
