"""Envoy as a child of the gateway: runs it, starts it again if it ends, and reads what it reports."""

import asyncio
import contextlib
import logging
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from fenka import procfs
from fenka.gateway import envoy_config
from fenka.gateway.client_sockets import ConnectionRelay
from fenka.gateway.envoy_binary import EnvoyUnavailable
from fenka.gateway.envoy_config import Config

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
"""Between two starts, if the first Envoy ended at once."""
POLL_S = 0.05
"""Between two looks at something that Envoy is about to do."""
TIMEOUT_S = 5.0
"""For an answer of Envoy's administration."""
MAX_ANSWER_BYTES = 64 << 20
"""Of 10,000 replicas with ten ports."""
_CONFIGURATION = "envoy.json"


class EnvoyProcess:
    """Envoy, and its directory.

    Attributes:
        starts: How often it was started.
        running: It serves.
    """

    def __init__(self, binary: str, directory: int, config: Config, relay: ConnectionRelay) -> None:
        """Start nothing yet.

        Args:
            binary: Envoy's path.
            directory: A descriptor of its working directory, which no other user may enter.
            config: Its configuration.
            relay: What serves connections that it has not accepted.
        """
        self._binary, self._directory, self._config, self._relay = binary, directory, config, relay
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._has_served = False
        self.starts = 0
        self.running = False

    @property
    def path(self) -> Path:
        """Return the directory's path in this process, which is short whatever its name is."""
        return Path(f"/proc/self/fd/{self._directory}")

    @property
    def pid(self) -> int:
        """Return its process; 0 for none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def write(self, name: str, content: Config) -> None:
        """Replace a file that Envoy reads. Raises OSError."""
        temporary = self.path / f".{name}.new"
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.rename(self.path / name)

    async def run(self) -> None:
        """Run Envoy until cancelled. One that ends is started again.

        Raises EnvoyUnavailable if it ends before it has served for the first time.
        """
        self.write(_CONFIGURATION, self._config)
        connector = aiohttp.UnixConnector(str(self.path / envoy_config.ADMIN_SOCKET))
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(
            "http://envoy", connector=connector, timeout=timeout
        ) as self._session:
            while True:
                began = loop.time()
                await self._run_once()
                await asyncio.sleep(max(0.0, began + RESTART_PAUSE_S - loop.time()))

    async def _run_once(self) -> None:
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            self._binary,
            *("--config-path", _CONFIGURATION, "--concurrency", "1", "--disable-hot-restart"),
            *("--log-level", "warning", "--skip-deprecated-logs"),
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the gateway, which lets Envoy finish its requests.
            start_new_session=True,
            # Two Envoys would share the port.
            preexec_fn=partial(procfs.die_with_parent, signal.SIGKILL),
        )
        self._process = process
        try:
            ended = asyncio.create_task(process.wait())
            while not self.running and not ended.done():
                self.running = await self._is_live()
                await asyncio.wait([ended], timeout=POLL_S)
            if self.running:
                self._relay.start()
            code = await ended
        finally:
            self.running = False
            self._relay.stop()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self.starts == 1 and not self._has_served:
            raise EnvoyUnavailable(
                f"{self._binary} has ended with status {code}: its message is above"
            )
        log.error("Envoy has ended with status %s and is started again", code)

    async def _is_live(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            self._has_served = await self._get("/ready") == b"LIVE\n"
            return self._has_served
        return False

    # --- administration -----------------------------------------------------------------------------

    async def clusters(self) -> list[Config]:
        """Return the replicas as Envoy sees them. Raises EnvoyUnavailable."""
        answer = msgspec.json.decode(await self._ask("/clusters?format=json"))
        statuses: list[Config] = answer.get("cluster_statuses", [])
        return statuses

    async def endpoint_versions(self) -> dict[str, str]:
        """Return the version of the endpoints that each cluster uses. Raises EnvoyUnavailable."""
        text = await self._ask(r"/stats?filter=^cluster\..*\.version_text$")
        rows = (line.partition(": ") for line in text.decode().splitlines())
        return {
            name.removeprefix("cluster.").removesuffix(".version_text"): value.strip('"')
            for name, _, value in rows
        }

    async def statistics(self) -> str:
        """Return the statistics that metrics are made of, in Prometheus' format. Raises EnvoyUnavailable."""
        return (await self._ask(f"/stats/prometheus?filter={envoy_config.STATISTICS}")).decode()

    async def active_requests(self) -> int:
        """Return the number of clients' requests that are not finished. Raises EnvoyUnavailable."""
        text = await self._ask(f"/stats?filter=^{envoy_config.ACTIVE_REQUESTS}$")
        return int(text.rpartition(b": ")[2] or 0)

    async def refuse_connections(self) -> None:
        """Have clients' new connections refused. Raises EnvoyUnavailable."""
        self._relay.close()
        await self.command("/drain_listeners?inboundonly")

    async def command(self, path: str) -> None:
        """Have Envoy do something. Raises EnvoyUnavailable."""
        await self._ask(path, "POST")

    async def _ask(self, path: str, method: str = "GET") -> bytes:
        try:
            return await self._get(path, method)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvoyUnavailable(f"Envoy does not answer: {error}") from None

    async def _get(self, path: str, method: str = "GET") -> bytes:
        if self._session is None:
            raise aiohttp.ClientError("it was not started")
        async with self._session.request(method, path) as response:
            response.raise_for_status()
            answer = await response.content.read(MAX_ANSWER_BYTES)
            while part := await response.content.read(MAX_ANSWER_BYTES):
                answer += part
            return answer


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as its hard limit allows. Return how many that are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1 << 20 if most == resource.RLIM_INFINITY else most
