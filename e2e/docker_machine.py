"""A machine with Docker: its engine, its command, Compose and runc, built from their Go modules.

dockerd runs in the machine's namespaces and starts its own containerd, which is the cluster's. It has no
network, no firewall and, since runc is built without libseccomp, no filter of system calls.
"""

import secrets
import shutil
import signal
import subprocess
import tempfile

from e2e.container_machine import ContainerMachine, eventually
from e2e.machine import ClusterError
from e2e.programs import DOCKER, OWN, build

_DATA = "/var/lib/containers/docker"
_INIT = "catatonit"


class DockerMachine(ContainerMachine):
    """A machine whose engine can be killed and started again."""

    engine = "docker"
    compose, compose_separator = "cmd", "-"

    def __init__(self, runtime: str, *, only_cgroup2: bool = False) -> None:
        for module in (*DOCKER, OWN):
            build(module)
        super().__init__(runtime, only_cgroup2=only_cgroup2)
        directories = (str(module.directory() / "bin") for module in (*DOCKER, OWN))
        self.environment["PATH"] = ":".join([*directories, self.environment["PATH"]])
        self.environment["DOCKER_CONFIG"] = "/run/docker-config"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._engine: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the engine."""
        self.start_engine()
        self.wait_for_engine()

    def start_engine(self, *options: str) -> None:
        """Start dockerd, with more options."""
        usual = ["--data-root", _DATA, "--bridge=none", "--userland-proxy=false"]
        usual += ["--iptables=false", "--ip6tables=false", "--seccomp-profile=unconfined"]
        init = shutil.which(_INIT)
        usual += ["--init-path", init] if init else []
        self._engine = subprocess.Popen(
            [*self.entry, "dockerd", *usual, *options],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def wait_for_engine(self) -> None:
        """Wait until dockerd answers. Raises ClusterError."""
        eventually(self._answers)

    def _answers(self) -> bool:
        if self._engine is None or self._engine.poll() is not None:
            self._log.seek(0)
            raise ClusterError(f"dockerd has ended: {self._log.read()[-2000:]}")
        return self.run("docker", "version").returncode == 0

    def stop_engine(self, number: int = signal.SIGTERM) -> None:
        """End dockerd: with its containers, or alone by SIGKILL."""
        if self._engine is not None:
            self._engine.send_signal(number)
            self._engine.wait()

    def container(self, *words: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a container to its end. Docker's command may miss what is printed at once; its log does not."""
        name = secrets.token_hex(8)
        done = self.run("docker", "run", "-i", "--name", name, *words, user=user)
        printed = self.run("docker", "logs", name, user=user).stdout
        self.remove(name, user=user)
        return subprocess.CompletedProcess(done.args, done.returncode, printed, done.stderr)

    def remove(self, *names: str, user: int = 0) -> None:
        """Remove containers at once."""
        self.command("rm", "-f", *names, user=user)

    def close(self) -> None:
        """End all."""
        super().close()
        self.stop_engine()
        self._log.close()
