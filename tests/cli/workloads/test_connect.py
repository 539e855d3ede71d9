"""`fenka logs` and `fenka attach` on a cluster."""

import json
import os
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fenka.kubernetes import pod_logs
from tests.builders import Json
from tests.cli.command import Completed, fenka
from tests.cli.workloads.conftest import Run
from tests.fakes.api_server import FakeApiServer
from tests.training_builders import condition, job_set, member, moment

RUNS: Json = {"running": {}}
ENDED: Json = {"terminated": {"exitCode": 0, "reason": "Completed"}}
WAITS: Json = {"waiting": {"reason": "ContainerCreating"}}
ROLES = {"launcher": 1, "worker": 1}


def line(second: int, text: str) -> str:
    """Return a line of a log with its timestamp."""
    return f"2024-01-01T00:00:{second:02}.123456789Z {text}"


def state(main: Json, init: Json | None = None) -> Json:
    """Return the status and the spec of a pod whose containers are in these states."""
    status: Json = {"containerStatuses": [{"name": "main", "state": main}]}
    if init is None:
        return {"status": status}
    status["initContainerStatuses"] = [{"name": "init-code", "state": init}]
    containers = [{"name": "main"}]
    spec = {"initContainers": [{"name": "init-code"}], "containers": containers}
    return {"status": status, "spec": spec}


@pytest.fixture
def job(server: FakeApiServer) -> FakeApiServer:
    """A job whose launcher and worker run and have printed something."""
    server.put("jobsets", job_set("j", roles=ROLES))
    for role in ROLES:
        server.put("pods", member("j", role, node="a", **state(RUNS)))
        server.logs[f"j-{role}-0-0-x7k2p", "main"] = [line(1, f"{role} 1"), line(2, f"{role} 2")]
    return server


def replace(
    server: FakeApiServer, role: str, main: Json, init: Json | None = None, **given: Any
) -> None:
    """Put the containers of an instance into other states."""
    server.put("pods", member("j", role, node="a", **state(main, init), **given))


def test_logs_are_the_chiefs(run: Run, job: FakeApiServer) -> None:
    """As they are, without timestamps."""
    assert run("log", "j") == Completed(0, "launcher 1\nlauncher 2\n", "")


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("-i", "j-worker-0"), "worker 1\nworker 2\n"),
        (("-i", "j-worker-0-0-x7k2p"), "worker 1\nworker 2\n"),
        (("-t", "1"), "launcher 2\n"),
        (("--tail", "0"), ""),
        (("--timestamps", "--tail=1"), line(2, "launcher 2") + "\n"),
    ],
)
def test_logs_are_what_the_options_select(
    run: Run, job: FakeApiServer, options: tuple[str, ...], printed: str
) -> None:
    """An instance by its name or its pod's; the last lines; the times."""
    assert run("logs", "j", *options).stdout == printed


def test_logs_since_a_time_ask_the_api_server_for_them(run: Run, job: FakeApiServer) -> None:
    """In seconds."""
    assert run("logs", "j", "--since", "5m").exit_code == 0
    assert "sinceSeconds=300" in job.requests[-1]


def test_logs_are_those_of_the_clone_while_the_code_is_cloned(run: Run, job: FakeApiServer) -> None:
    """Then the program's; `-c` selects either."""
    job.logs["j-launcher-0-0-x7k2p", "init-code"] = [line(0, "Cloning")]
    replace(job, "launcher", {"waiting": {"reason": "PodInitializing"}}, RUNS, phase="Pending")
    assert run("logs", "j").stdout == "Cloning\n"
    replace(job, "launcher", RUNS, ENDED)
    assert run("logs", "j", "-c", "init-code").stdout == "Cloning\n"


@pytest.mark.parametrize("follow", [(), ("-f",)])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("-i", "x"), "job j has no instance x: its instances are j-launcher-0, j-worker-0"),
        (("-c", "x"), "j-launcher-0 has no container x: its containers are main"),
    ],
)
def test_logs_of_what_does_not_exist_are_one_sentence(
    run: Run,
    job: FakeApiServer,
    options: tuple[str, ...],
    sentence: str,
    follow: tuple[str, ...],
) -> None:
    """It names what there is. Following does not wait for it."""
    assert run("logs", "j", *options, *follow) == Completed(1, "", f"fenka: {sentence}\n")


def test_logs_of_an_instance_that_has_not_started_are_one_sentence(
    run: Run, job: FakeApiServer
) -> None:
    """Without a chief, or before its container runs."""
    replace(job, "launcher", WAITS, phase="Pending")
    assert (
        run("logs", "j").stderr == "fenka: j-launcher-0 has no log yet: it is ContainerCreating\n"
    )
    job.remove("pods", "j-launcher-0-0-x7k2p", "default")
    job.put("jobsets", job_set("j", roles={"launcher": 1, "worker": 2}))
    job.put("pods", member("j", "worker", 1))
    assert run("logs", "j").stderr == (
        "fenka: job j is PENDING, and its chief does not exist now: its instances are j-worker-0, "
        "j-worker-1 (-i)\n"
    )


def test_following_goes_on_over_a_restart_until_the_job_ends(
    run: Run, job: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clone, the program, the next attempt's program; each line once."""
    monkeypatch.setattr(pod_logs, "POLL_S", 0)
    name = "j-launcher-0-0-x7k2p"
    job.logs[name, "init-code"] = [line(0, "Cloning")]
    replace(job, "launcher", WAITS, RUNS, phase="Pending")

    def running() -> None:
        replace(job, "launcher", RUNS, ENDED)

    def failed() -> None:
        replace(job, "launcher", {"terminated": {"exitCode": 1}}, ENDED, phase="Failed")

    def restarted() -> None:
        job.put(
            "pods",
            member(
                "j",
                "launcher",
                name="again",
                attempt=1,
                node="a",
                created=moment(9),
                **state(ENDED),
            ),
        )
        job.logs["again", "main"] = [line(5, "resumed")]

    def ended() -> None:
        job.put("jobsets", job_set("j", roles=ROLES, conditions=[condition("Completed", 20)]))
        job.put(
            "pods",
            member(
                "j",
                "launcher",
                name="again",
                attempt=1,
                node="a",
                created=moment(9),
                phase="Succeeded",
                **state(ENDED),
            ),
        )

    steps: list[Callable[[], None]] = [running, failed, restarted, ended]

    async def step(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/log") and steps:
            steps.pop(0)()
        return None

    job.after = step
    result = run("logs", "j", "-f")
    assert result.stdout.splitlines() == ["Cloning", "launcher 1", "launcher 2", "resumed"]
    assert (result.exit_code, steps) == (0, [])


def test_following_waits_for_a_chief_that_does_not_exist_yet(
    run: Run, job: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI's launcher comes after its workers."""
    monkeypatch.setattr(pod_logs, "POLL_S", 0)
    job.remove("pods", "j-launcher-0-0-x7k2p", "default")
    looks = 0

    async def look(request: web.Request) -> None:
        nonlocal looks
        looks += request.path.endswith("/jobsets")
        if looks == 3:
            replace(job, "launcher", ENDED, phase="Succeeded")
        if looks == 4:
            job.put("jobsets", job_set("j", roles=ROLES, conditions=[condition("Completed")]))

    job.before = look
    assert run("logs", "j", "-f").stdout == "launcher 1\nlauncher 2\n"


def test_following_one_instance_ends_with_it(run: Run, job: FakeApiServer) -> None:
    """A worker that has succeeded prints nothing more, though the job goes on."""
    replace(job, "worker", ENDED, phase="Succeeded")
    assert run("logs", "j", "-f", "-i", "j-worker-0").stdout == "worker 1\nworker 2\n"


# ---- attach ----


def program(received: list[bytes], code: int) -> Callable[[web.WebSocketResponse], object]:
    """Return a command that reads its input to the end, prints to both outputs and exits."""

    async def run_it(socket: web.WebSocketResponse) -> None:
        while (message := await socket.receive_bytes()) != b"\xff\x00":
            received.append(message)
        await socket.send_bytes(b"\x01hello\n")
        await socket.send_bytes(b"\x02warning\n")
        causes = [{"reason": "ExitCode", "message": str(code)}]
        status = (
            {"status": "Failure", "details": {"causes": causes}} if code else {"status": "Success"}
        )
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())

    return run_it


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Return what sets the standard input of the next command."""

    def type_(data: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        monkeypatch.setattr("sys.stdin", os.fdopen(reading))

    return type_


@pytest.mark.parametrize("code", [0, 7])
def test_attach_runs_a_command_with_this_input_and_its_exit_code(
    run: Run, job: FakeApiServer, typed: Callable[[bytes], None], code: int
) -> None:
    """In the chief's program's container; both outputs stay apart."""
    typed(b"input\n")
    received: list[bytes] = []
    job.program = program(received, code)  # type: ignore[assignment]
    assert run("attach", "j", "--", "sh", "-c", "cat -") == Completed(code, "hello\n", "warning\n")
    assert received == [b"\x00input\n"]
    assert "/j-launcher-0-0-x7k2p/exec?container=main&" in job.requests[-1]
    assert job.requests[-1].endswith("&command=sh&command=-c&command=cat+-")


def test_attach_runs_sh_in_the_instance_that_is_named(
    run: Run, job: FakeApiServer, typed: Callable[[bytes], None]
) -> None:
    """`-i` and `-c`."""
    typed(b"")
    job.program = program([], 0)  # type: ignore[assignment]
    spec = {"containers": [{"name": "main"}, {"name": "side"}]}
    job.put("pods", member("j", "worker", node="a", spec=spec, **state(RUNS)))
    assert run("attach", "j", "-i", "j-worker-0", "-c", "side").exit_code == 0
    assert "/j-worker-0-0-x7k2p/exec?container=side&" in job.requests[-1]
    assert job.requests[-1].endswith("&command=sh")


def test_attach_passes_a_terminal_through(
    run: Run, job: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size, and every key: Ctrl-C is a byte. Afterwards the terminal is as it was."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    before = termios.tcgetattr(theirs)
    received: list[bytes] = []

    async def shell(socket: web.WebSocketResponse) -> None:
        received.append(await socket.receive_bytes())
        assert not termios.tcgetattr(theirs)[3] & termios.ICANON
        os.write(ours, b"\x03")
        received.append(await socket.receive_bytes())
        await socket.send_bytes(b"\x01$ ")
        await socket.send_bytes(b'\x03{"status": "Success"}')

    job.program = shell
    monkeypatch.setattr("sys.stdin", os.fdopen(theirs))
    try:
        assert run("attach", "j") == Completed(0, "$ ", "")
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
    assert received == [b'\x04{"Width": 100, "Height": 24}', b"\x00\x03"]
    assert "tty=true" in job.requests[-1]


def test_attach_is_one_sentence_when_it_is_impossible(
    run: Run, job: FakeApiServer, typed: Callable[[bytes], None]
) -> None:
    """The instance does not run, or the user may not."""
    typed(b"")
    assert run("attach", "j").stderr == (
        "fenka: you may not run commands in pods of namespace default: ask for the ClusterRole fenka-user\n"
    )
    assert run("attach", "j", "-c", "x").stderr == (
        "fenka: j-launcher-0 has no container x: its containers are main\n"
    )
    replace(job, "launcher", ENDED, phase="Succeeded")
    assert run("attach", "j").stderr == "fenka: j-launcher-0 is not running: it is Completed\n"


def test_logs_without_a_cluster_or_a_daemon_say_what_was_looked_for(tmp_path: Path) -> None:
    """Neither answers."""
    result = fenka("logs", "nothing")
    assert result.exit_code == 1
    assert result.stderr.startswith("fenka: job or service nothing not found on this machine")
