"""Run a notebook as users do: log in, compute in a kernel, let it be idle, start it again."""

import sys
from pathlib import Path

import pytest

from e2e.cluster import wait_until
from e2e.images import NOTEBOOK
from e2e.scenarios.containers import wait_for_no_leases
from e2e.scenarios.installation import FENKA, Installation
from e2e.scenarios.jobs import Jobs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PASSWORD = "mypassw0rd"
CLIENT = Path(__file__).parent / "notebook_client.py"
COMPUTE = """
import numpy as np, pathlib
from numba import cuda
@cuda.jit
def add_one(source, target):
    index = cuda.grid(1)
    target[index] = source[index] + 1
array = cuda.to_device(np.zeros(1024, np.float32))
add_one[4, 256](array, array)
cuda.synchronize()
pathlib.Path("result").write_text("kept")
print(cuda.current_context().get_memory_info().total >> 20)
"""


def in_kernel(jobs: Jobs, address: str, password: str, code: str) -> str:
    """Return what code prints in a new kernel of the notebook."""
    argv = (sys.executable, str(CLIENT), address.removesuffix("/lab"), password, code)
    return jobs.installation.cluster.run(*argv).strip()


def service_address(jobs: Jobs) -> str:
    """Return the address of the notebook's Service in the cluster."""
    service = jobs.installation.cluster.get("service", "nb", jobs.namespace)
    return f"http://{service['spec']['clusterIP']}/"


def test_idle_notebook_frees_its_slice_and_has_its_files_when_it_is_started(
    installation: Installation, sharing_node: str, namespace: str
) -> None:
    """A kernel that is alive but does not use the card does not keep the slice."""
    jobs, cluster = Jobs(installation, namespace), installation.cluster
    with jobs.claim("work", sharing_node):
        options = ["--image", NOTEBOOK, "--gpu-mem=4", "--data=work:/work", "--idle=60s"]
        command = [*FENKA, "notebook", "-n", namespace, "--name=nb", "--service=NodePort", *options]
        printed = cluster.run("env", f"PASSWORD={PASSWORD}", *command)
        address = printed.splitlines()[-1].removeprefix("nb: ")
        assert in_kernel(jobs, address, "wrong", COMPUTE) == "refused"
        shown = in_kernel(jobs, service_address(jobs), PASSWORD, COMPUTE)
        # Among warnings of numba and of the simulated driver.
        assert "4308" in shown.splitlines()
        (pod,) = jobs.pods("notebook").values()
        inside = ("-n", namespace, "exec", pod["metadata"]["name"], "--", "sh", "-c")
        shown = cluster.kubectl(*inside, "cat /proc/[0-9]*/cmdline")
        assert "jupyter" in shown
        assert PASSWORD not in shown

        jobs.wait_for("nb", "STOPPED", 180)
        wait_for_no_leases(installation, sharing_node)
        again = jobs.fenka("start", "nb")
        assert again.splitlines()[-1] == f"nb: {address}"
        look = "print(open('result').read())"
        assert in_kernel(jobs, address, PASSWORD, look) == "kept"
        jobs.fenka("delete", "nb")
        wait_until("nothing of the notebook is left", lambda: not jobs.objects())
