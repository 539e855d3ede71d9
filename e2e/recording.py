"""Record a run of the end-to-end tests with FENKA_E2E_RECORD=1: versions, and how its tests ended."""

import platform
import subprocess

import pytest

from e2e import virtual_node
from e2e.machine import VIRTUAL
from e2e.programs import HELM, OWN, chosen_containerd, chosen_helm, chosen_kubernetes
from e2e.supervisor import hierarchies
from tools.where_it_runs import Tried, record


def parts() -> dict[str, str]:
    """Return the versions of what the cluster consists of."""
    runtime = chosen_containerd()
    containerd = "github.com/containerd/containerd" + ("/v2" if runtime is OWN else "")
    helm = chosen_helm()
    runc = subprocess.run(["runc", "--version"], check=True, capture_output=True, text=True).stdout
    system = platform.freedesktop_os_release()
    libc, libc_version = platform.libc_ver()
    versions = {
        "Kubernetes": chosen_kubernetes().version("k8s.io/kubernetes"),
        "containerd": runtime.version(containerd),
        "runc": runc.split()[2],
        "cgroup": "v1" if "memory" in hierarchies() else "v2",
        "helm": helm.version("helm.sh/helm/v4" if helm is HELM else "helm.sh/helm/v3"),
        "processor": platform.machine().replace("_", "-"),
        "Linux": ".".join(platform.release().split(".")[:2]),
        "distribution": f"{system['ID'].capitalize()} {system['VERSION_ID']}",
        "C library": f"{libc} {libc_version}",
        "Python": platform.python_version(),
    }
    if VIRTUAL:
        tried = virtual_node.parts()
        versions = tried | versions | tried
    # The first part is the one that is tried.
    for part, chosen in (("helm", helm is not HELM), ("containerd", runtime is not OWN)):
        versions = {part: versions[part]} | versions if chosen else versions
    return {
        name: version if name == "cgroup" else version.removeprefix("v")
        for name, version in versions.items()
    }


class Recorder:
    """Counts the tests of a session, and records them when it ends."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note why tests marked `since` do not run. They have a reason of the version's."""
        for item in session.items:
            since = item.get_closest_marker("since")
            for mark in item.iter_markers("skip"):
                if since and "Kubernetes" in mark.kwargs["reason"]:
                    self.skipped.append(f"{since.args[1]} (since {since.args[0]})")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test."""
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record, unless no test has run."""
        if self.passed or self.failed:
            chosen = session.config.option.markexpr or session.config.option.keyword or "all"
            chosen += ", interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else ""
            chosen += f", on a virtual machine ({VIRTUAL})" if VIRTUAL else ""
            failed, skipped = tuple(dict.fromkeys(self.failed)), tuple(dict.fromkeys(self.skipped))
            run = Tried(parts(), f"end-to-end, {chosen}", self.passed, failed, skipped)
            record(run)
