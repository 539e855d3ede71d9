"""`fenka dashboard` with a real daemon and programs that hold memory."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.ports import free_port
from tests.workstation.conftest import HOLD, Workstation, eventually, idle_t4s, refused, station, t4

__all__ = ["idle_t4s", "station", "t4"]

pytestmark = pytest.mark.process


class Page:
    """A dashboard that a user has started, as a browser that has its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout
        self.url = process.stdout.readline().strip()
        self.parts = urlsplit(self.url)
        self.token = self.parts.fragment.removeprefix("token=")

    def connect(self) -> http.client.HTTPConnection:
        """Connect to it. Browsers resolve its name themselves; Python asks the system, which may not."""
        assert self.parts.port
        return http.client.HTTPConnection("127.0.0.1", self.parts.port, timeout=60)

    def ask(
        self, path: str, body: Any = None, *, method: str = "", token: str | None = None
    ) -> tuple[int, bytes]:
        """Send one request to a path below the page. Return the status and the body of its answer."""
        headers = {
            "Host": self.parts.netloc,
            "Authorization": f"Bearer {self.token if token is None else token}",
        }
        text = None if body is None else json.dumps(body)
        if text is not None:
            headers["Content-Type"] = "application/json"
        with contextlib.closing(self.connect()) as connection:
            verb = method or ("GET" if body is None else "POST")
            connection.request(verb, self.parts.path + path, text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def world(self) -> Any:
        """Return what the page shows now; None before it shows anything."""
        status, body = self.ask("api/world")
        return json.loads(body) if status == 200 else None

    def shown(self, *names: str) -> Any:
        """Wait until these programs hold slices, and return what the page shows then."""

        def seen() -> Any:
            world = self.world()
            return (
                world
                if world and {line["name"] for line in world["programs"]} == {*names}
                else None
            )

        return eventually(seen)

    def worlds(self) -> Iterator[Any]:
        """Yield the messages of the stream."""
        with contextlib.closing(self.connect()) as connection:
            headers = {"Host": self.parts.netloc, "Authorization": f"Bearer {self.token}"}
            connection.request("GET", f"{self.parts.path}api/live", headers=headers)
            answer = connection.getresponse()
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


@contextlib.contextmanager
def dashboard(station: Workstation, *options: str) -> Iterator[Page]:
    """Run `fenka dashboard`, until its user presses Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fenka", "dashboard", "--no-open", *options],
        env=station.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        page = Page(process)
        eventually(page.world)
        yield page
    finally:
        process.terminate()
        process.wait()
        assert process.stdout
        process.stdout.close()


def test_sums_have_users_their_costs_and_waits(station: Workstation) -> None:
    """By the daemon's ledger and its history: one request was granted at once."""
    station.start("--simulate", "T4", "--price", "Tesla T4=3600", "--currency", "EUR")
    station.run("--gpu-mem", "4", "--name", "a", "--", *HOLD, "100").report()

    def sums() -> Any:
        status, body = page.ask("api/sums")
        assert status == 200
        return json.loads(body)

    with dashboard(station) as page:
        eventually(lambda: [line["kind"] for line in sums()["today"]][:2] == ["held", "idle"])
        known = sums()
    held, idle = known["month"][:2]
    # 4308 of 15079 MiB are held; the price is that of a second.
    # Hours have six decimals: 0.0000005 h * 3600 EUR = 0.0018 EUR.
    assert held["cost"] == pytest.approx(held["card_hours"] * 3600, abs=0.0019)
    assert held["card_hours"] <= (held["card_hours"] + idle["card_hours"]) * 4308 / 15079 + 1e-9
    assert (known["currency"], known["problem"]) == ("EUR", "")
    assert (known["waits"]["granted"], known["waits"]["waited"]) == (1, 0)
    assert known["since"] % 86_400 == 0


def test_page_shows_what_commands_say(t4: Workstation) -> None:
    """S1: three programs of four units that got 4308 MiB each; the fourth waits with the queue's sentence."""
    for name in ("nb1", "nb2", "nb3"):
        (held,) = t4.run("--gpu-mem", "4", "--name", name, "--", *HOLD, "4308").report()["cards"]
        assert (held["result"], held["total"]) == (0, 4308)
    waiting = t4.run("--gpu-mem", "4", "--name", "nb4", "--", *HOLD, "4308")
    assert "waiting" in waiting.says()
    with dashboard(t4) as page:
        world = page.shown("nb1", "nb2", "nb3")
        (card,) = world["cards"]
        assert [(s["used_mib"], s["held_mib"]) for s in card["slices"]] == [(4308, 4308)] * 3
        assert (card["free_units"], card["units"], card["held_mib"]) == (2, 14, 12924)
        (queued,) = json.loads(t4.ok("queue", "-o", "json"))
        (line,) = world["waiting"]
        assert (line["why"], line["asks"]) == (queued["why"], queued["asks"])
        # Both are found while the page is open.
        said = t4.ok("why", "nb4").splitlines()
        helps = eventually(lambda: page.world()["waiting"][0]["helps"])
        assert said[
            0
        ] == "nb4 waits at position 1 of 1 for 4: no GPU fits: 1 of 1 has too little memory; " + (
            "card 0 is reserved for it"
        )
        assert said[1:] == ["", "What helps:", *(f"  - {sentence}" for sentence in helps)]
        status, body = page.ask(f"api/program/{line['id']}")
        assert status == 200
        assert json.loads(body)["explanation"] == said

        os.kill(t4.jobs()["nb2"]["pid"], signal.SIGKILL)
        assert waiting.report()["cards"][0]["total"] == 4308
        world = page.shown("nb1", "nb3", "nb4")
        assert world["cards"][0]["held_mib"] == 12924
        assert not world["waiting"]


def test_what_if_says_what_starts(t4: Workstation) -> None:
    """The answer about two more cards comes true on a machine that has them."""
    requests = {"first": "14", "a": "14", "b": "14", "c": "14"}
    for name, units in requests.items():
        program = t4.run("--gpu-mem", units, "--name", name, "--", *HOLD, "100")
        if name == "first":
            program.report()
        else:
            assert "waiting" in program.says()
    with dashboard(t4) as page:
        status, body = page.ask("api/what-if", {"add": {"Tesla T4": 2}})
        answer = json.loads(body)
        assert status == 200
        assert answer["starts"] == ["a", "b"]
        assert answer["sentence"].startswith(
            "2 of 3 start: a, b. c: no GPU fits: 3 of 3 have too little memory"
        )
        assert {job["state"] for job in t4.jobs().values()} == {"running", "waiting"}
        status, body = page.ask("api/what-if", {"end": ["none"]})
        assert (status, json.loads(body)["problem"]) == (
            409,
            "no program has the id none: it has ended",
        )
    larger = Workstation(t4.root.with_name(f"{t4.root.name}-3"), [])
    with contextlib.closing(larger):
        larger.root.mkdir(mode=0o700)
        larger.start("--simulate", "T4*3")
        for name, units in requests.items():
            program = larger.run("--gpu-mem", units, "--name", name, "--", *HOLD, "100")
            if name == "c":
                assert "waiting" in program.says()
            else:
                program.report()


def test_page_stays_when_the_daemon_is_killed_or_hangs(station: Workstation) -> None:
    """What was there stays with a sentence that it is old, and goes on with the next daemon."""
    station.start("--simulate", "T4")
    station.run("--gpu-mem", "4", "--name", "a", "--", *HOLD, "100").report()
    with dashboard(station) as page:
        page.shown("a")
        worlds = page.worlds()
        assert not next(worlds)["problems"]
        station.kill_daemon()
        lost = next(world for world in worlds if world["problems"])
        assert [line["name"] for line in lost["programs"]] == ["a"]
        station.start("--simulate", "T4")
        back = next(world for world in worlds if not world["problems"])
        assert back["at"] > lost["at"]

        daemon = station.daemon_pid()
        os.kill(daemon, signal.SIGSTOP)
        try:
            old = next(world for world in worlds if world["problems"])
            assert old["problems"] == ["the fenka daemon does not answer: what is shown is old"]
            assert page.world()["at"] == old["at"]
            status, body = page.ask("api/what-if", {})
            assert (status, json.loads(body)["problem"]) == (
                503,
                f"the daemon at {station.root}/daemon.sock went away: try again",
            )
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert next(world for world in worlds if not world["problems"])["at"] > old["at"]


def test_twenty_viewers_see_the_same_message(t4: Workstation) -> None:
    """The daemon is asked once for all of them."""
    t4.run("--gpu-mem", "4", "--name", "a", "--", *HOLD, "100").report()
    with dashboard(t4) as page:
        page.shown("a")
        with ThreadPoolExecutor(20) as viewers:
            seen = viewers.map(
                lambda _: {world["at"] for world in islice(page.worlds(), 3)}, range(20)
            )
            # All read the same few messages: one a second.
            assert len(set[float]().union(*seen)) < 20


def test_own_program_is_read_resized_and_stopped(t4: Workstation) -> None:
    """With the right of the user who started the dashboard, through the daemon."""
    words = "echo begun; echo more; exec sleep 1000"
    t4.ok("run", "--detach", "--gpu-mem", "4", "--name", "a", "--", "sh", "-c", words)
    with dashboard(t4) as page:
        (line,) = page.shown("a")["programs"]
        assert eventually(lambda: page.ask(f"api/logs/{line['id']}?lines=1")) == (200, b"more\n")
        assert page.ask(f"api/logs/{line['id']}") == (200, b"begun\nmore\n")
        assert page.ask(f"api/logs/{line['id']}?lines=0")[0] == 400
        assert page.ask("api/logs/none")[0] == 404
        assert page.ask(f"api/resize/{line['id']}", {"gpu_mem": "6"})[0] == 200
        assert t4.jobs()["a"]["slices"][0]["memory_mib"] == 6462
        status, body = page.ask(f"api/resize/{line['id']}", {"gpu_mem": "15"})
        assert status == 409
        assert "a" in json.loads(body)["problem"]
        assert page.ask(f"api/prioritize/{line['id']}", {"priority": -2})[0] == 200
        eventually(lambda: page.shown("a")["programs"][0]["priority"] == -2)
        status, body = page.ask(f"api/prioritize/{line['id']}", {"priority": -1000001})
        assert (status, json.loads(body)["problem"]) == (
            409,
            "--priority must be from -1000000 to 1000000, not -1000001",
        )
        for wrong in ({}, {"priority": "1"}, {"priority": 1.5}, {"priority": 1, "name": "b"}):
            assert page.ask(f"api/prioritize/{line['id']}", wrong)[0] == 400
        assert t4.jobs()["a"]["priority"] == -2
        assert page.ask(f"api/stop/{line['id']}", {})[0] == 200
        page.shown()
        status, body = page.ask(f"api/program/{line['id']}")
        assert status == 200
        ended = json.loads(body)
        assert "stopped by" in ended["explanation"][0]
        assert ended["logs"]
        assert page.ask(f"api/logs/{line['id']}") == (200, b"begun\nmore\n")
        assert page.ask("api/program/none")[0] == 404


def test_nothing_can_be_changed_when_it_is_read_only(t4: Workstation) -> None:
    """There are no such routes; questions are still answered."""
    t4.run("--gpu-mem", "4", "--name", "a", "--", *HOLD, "100").report()
    with dashboard(t4, "--read-only", "--prefix", "/gpu") as page:
        assert page.parts.path == "/gpu/"
        _, body = page.ask("api/world")
        (line,) = json.loads(body)["programs"]
        assert not json.loads(body)["actions"]
        for verb in ("stop", "resize", "prioritize"):
            assert page.ask(f"api/{verb}/{line['id']}", {})[0] in (404, 405)
        assert page.ask("api/what-if", {})[0] == 200
        assert page.ask("../api/world")[0] == 404
        assert t4.jobs()["a"]["state"] == "running"


def test_second_start_prints_the_first_address(t4: Workstation) -> None:
    """Nobody else can read it, and the next start has another token."""
    with dashboard(t4) as page:
        assert t4.ok("dashboard", "--no-open").strip() == page.url
        file = t4.root / "dashboard"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert len(page.token) == 43
        former = page.token
    with dashboard(t4) as page:
        assert page.token != former
        assert page.ask("api/world", token=former)[0] == 401


def test_token_is_in_no_argument(t4: Workstation, tmp_path: Any) -> None:
    """Every user of the machine sees the arguments of the browser that is opened."""
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/seen\ncat "${{1#file://}}" >> {tmp_path}/page\n'
    )
    browser.chmod(0o755)
    t4.environment |= {"DISPLAY": ":9", "BROWSER": str(browser)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fenka", "dashboard"],
            env=t4.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        page = Page(process)
        eventually(lambda: (tmp_path / "page").exists() and (tmp_path / "page").read_text())
        assert page.token not in (tmp_path / "seen").read_text()
        assert page.url in (tmp_path / "page").read_text()
    finally:
        process.terminate()
        process.wait()
        for name in ("DISPLAY", "BROWSER"):
            del t4.environment[name]


def test_bad_input_gets_one_sentence(station: Workstation) -> None:
    """And exit code 2."""
    refused(
        station.fenka("dashboard"),
        2,
        r"there is nothing to show: no fenka daemon answers at .*: start one with `fenka daemon`",
    )
    station.start("--simulate", "T4")
    file = station.root / "dashboard"
    os.mkfifo(file)
    refused(station.fenka("dashboard"), 2, rf"{file} is no file: remove it")
    file.unlink()
    port = free_port()
    with dashboard(station, "--port", str(port)) as page:
        assert page.parts.port == port
    refused(
        station.fenka("dashboard", "--port", "1", "--listen", "127.0.0.1.5"),
        2,
        r"invalid --listen '127.0.0.1.5': .*",
    )
    refused(station.fenka("dashboard", "--host", "a:1"), 2, r"invalid --host 'a:1': .*")
    refused(station.fenka("dashboard", "--prefix", "/a//b"), 2, r"invalid --prefix '/a//b': .*")


def test_port_is_a_free_one_unless_it_is_given(station: Workstation) -> None:
    """A port that another program has is named in the sentence."""
    station.start("--simulate", "T4")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(
            station.fenka("dashboard", "--port", str(port)),
            2,
            rf"port {port} of 127.0.0.1 cannot be used \(Address already in use\): .*",
        )


def test_stranger_cannot_answer_under_the_name_when_a_dashboard_runs(t4: Workstation) -> None:
    """Browsers look for it at ::1 first, where any user may listen; who has a port there is named."""
    with dashboard(t4) as page, pytest.raises(OSError, match="already in use"):
        socket.create_server(("::1", page.parts.port or 0), family=socket.AF_INET6)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        refused(
            t4.fenka("dashboard", "--port", str(port)),
            2,
            f"another program has port {port} at another loopback address, .*",
        )


def test_name_is_new_when_the_dashboard_starts_again(t4: Workstation) -> None:
    """So what a browser keeps for one server goes to no other; names that can be guessed are refused."""
    port = str(free_port())
    names = set()
    for _ in range(2):
        with dashboard(t4, "--port", port) as page:
            assert page.parts.hostname
            names.add(page.parts.hostname)
            assert re.fullmatch(r"[0-9a-f]{32}\.localhost", page.parts.hostname)
            for name in ("127.0.0.1", "localhost", f"{'0' * 32}.localhost"):
                with contextlib.closing(page.connect()) as connection:
                    headers = {"Authorization": f"Bearer {page.token}", "Host": f"{name}:{port}"}
                    connection.request("GET", "/", headers=headers)
                    assert connection.getresponse().status == 421
    assert len(names) == 2


def test_unix_socket_serves_the_page_when_ssh_forwards_to_it(t4: Workstation) -> None:
    """The sentence names it; only its user can enter it, and it is gone with the dashboard."""
    with dashboard(t4) as page:
        path = t4.root / "dashboard.sock"
        said = t4.fenka("dashboard", "--no-open")
        assert f"`ssh -L {page.parts.port}:{path} " in said.stderr
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with contextlib.closing(page.connect()) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(path))
            headers = {"Authorization": f"Bearer {page.token}", "Host": page.parts.netloc}
            connection.request("GET", "/api/world", headers=headers)
            assert connection.getresponse().status == 200
    assert not path.exists()


def test_ctrl_c_ends_it_when_the_daemon_hangs(station: Workstation) -> None:
    """It waits for no answer, whatever it has asked."""
    station.start("--simulate", "T4")
    with dashboard(station) as page:
        daemon = station.daemon_pid()
        os.kill(daemon, signal.SIGSTOP)
        try:
            next(world for world in page.worlds() if world["problems"])
            page.process.send_signal(signal.SIGINT)
            assert page.process.wait() == 0
        finally:
            os.kill(daemon, signal.SIGCONT)


def test_ending_ends_open_streams(t4: Workstation) -> None:
    """Ctrl-C needs not wait for viewers."""
    with dashboard(t4) as page:
        worlds = page.worlds()
        next(worlds)
        ending = os.pidfd_open(page.process.pid)
        page.process.send_signal(signal.SIGINT)
        select.select([ending], [], [])
        os.close(ending)
        assert page.process.wait() == 0
