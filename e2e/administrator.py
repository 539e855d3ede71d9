"""Use a cluster as its administrator: kubectl, helm, objects, events, namespaces."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.machine import HANGS_AFTER_S, ClusterError, Machine, run, wait_until

NUMBERS = itertools.count(1)
FETCH = (
    "import sys, urllib.request; "
    "print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
)
"""A Python program that prints the answer to a GET request for its argument."""


class Administrator:
    """An administrator of the cluster, in the control plane's network."""

    def __init__(self, control_plane: Machine) -> None:
        self.control_plane = control_plane

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; it works from the control plane and from the nodes."""
        return self.control_plane.files.state / "pki" / "admin.kubeconfig"

    def command(self, *argv: str) -> list[str]:
        """Return a command for subprocess.Popen that runs argv in the control plane's network.

        Run it with environment().
        """
        return self.control_plane.network_command(*argv)

    def environment(self) -> dict[str, str]:
        """Return an environment with kubectl and helm on PATH and the administrator's KUBECONFIG."""
        return self.control_plane.environment()

    def run(
        self,
        *argv: str,
        stdin: str | None = None,
        timeout: float = HANGS_AFTER_S,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a program as an administrator would, and return its output.

        It has this machine's files and working folder, and the control plane's network.

        Raises:
            ClusterError: the program failed; the text is its error output.
        """
        full = self.environment() | dict(environment or {})
        return run(self.command(*argv), full, stdin, timeout)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, timeout: float = HANGS_AFTER_S
    ) -> str:
        """Return the output of kubectl. Raise ClusterError with its error output if it fails."""
        return self.run("kubectl", *arguments, stdin=stdin, timeout=timeout)

    def fetch(self, url: str) -> str:
        """Return the answer to a GET request from the control plane's network."""
        return self.run("python3", "-c", FETCH, url)

    def helm(self, *arguments: str, timeout: float = HANGS_AFTER_S) -> str:
        """Return the output of helm."""
        return self.run("helm", *arguments, timeout=timeout)

    def apply(self, text: str, namespace: str = "default") -> None:
        """Create or update the objects of a YAML text."""
        self.kubectl("-n", namespace, "apply", "-f", "-", stdin=text)

    def delete(self, text: str, namespace: str = "default") -> None:
        """Delete the objects of a YAML text without a grace period."""
        options = ("--ignore-not-found", "--grace-period=0", "--force")
        self.kubectl("-n", namespace, "delete", "-f", "-", *options, stdin=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """Return one object."""
        document: dict[str, Any] = json.loads(
            self.kubectl("-n", namespace, "get", kind, name, "-o", "json")
        )
        return document

    def list(
        self, kind: str, namespace: str = "default", selector: str = ""
    ) -> Sequence[dict[str, Any]]:
        """Return the objects of a kind in a namespace that match a label selector (default: all)."""
        arguments = ("-n", namespace, "get", kind, "-o", "json", "-l", selector)
        items: Sequence[dict[str, Any]] = json.loads(self.kubectl(*arguments))["items"]
        return items

    def events(self, name: str, namespace: str = "default") -> Sequence[str]:
        """Return the messages of the events about one object, oldest first."""
        chosen = f"--field-selector=involvedObject.name={name}"
        output = self.kubectl("-n", namespace, "get", "events", chosen, "-o", "json")
        return [
            event.get("message") or event.get("note", "") for event in json.loads(output)["items"]
        ]

    def wait_for_pod(
        self, name: str, namespace: str = "default", phase: str = "Running", seconds: float = 60
    ) -> dict[str, Any]:
        """Wait until the pod has the phase (and is Ready, if the phase is Running), and return it."""
        seen: dict[str, Any] = {}

        def has_phase() -> bool:
            seen.update(self.get("pod", name, namespace))
            status = seen["status"]
            conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
            if status.get("phase") != phase:
                return False
            return phase != "Running" or conditions.get("Ready") == "True"

        try:
            wait_until(f"pod {name}: {phase}", has_phase, seconds)
        except ClusterError as error:
            last = "\n".join(self.events(name, namespace)[-5:])
            status = seen.get("status")
            raise ClusterError(f"{error}; its status is {status}\nevents:\n{last}") from error
        return seen

    def wait_for_service_account(self, namespace: str) -> None:
        """Wait until pods can be created in a namespace."""

        def exists() -> bool:
            return bool(self.get("serviceaccount", "default", namespace))

        wait_until(f"the default ServiceAccount of {namespace}", exists)

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """Create a namespace in which pods can be created; delete its pods at once at the end."""
        chosen = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] + f"-{next(NUMBERS)}"
        self.kubectl("create", "namespace", chosen)
        try:
            self.wait_for_service_account(chosen)
            yield chosen
        finally:
            kinds = "deployments,daemonsets,statefulsets,replicasets,jobs,pods"
            at_once = ("--grace-period=0", "--force", "--timeout=30s")
            self.kubectl("-n", chosen, "delete", kinds, "--all", *at_once)
            self.kubectl("delete", "namespace", chosen, "--wait=false")
