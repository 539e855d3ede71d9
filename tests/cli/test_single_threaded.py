"""Commands that enter a lease are single-threaded, as the kernel requires of who enters a user namespace."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "fenka.cli.control",
        "fenka.cli.notebook_command",
        "fenka.cli.run",
        "fenka.cli.workloads.selection",
        "fenka.local.launch",
        "fenka.local.lease_jobs",
    ],
)
def test_module_of_a_command_that_enters_a_lease_starts_no_thread(module: str) -> None:
    """numpy's linear algebra starts one for each processor when it is imported."""
    program = (
        f"import os, sys, {module}\n"
        "print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "1"]


@pytest.mark.parametrize("module", ["fenka.cli.screens.ps", "fenka.cli.workloads.local_backend"])
def test_module_of_a_local_screen_imports_no_server_and_no_driver(module: str) -> None:
    """Each would cost a command some hundredths of a second."""
    servers = {"asyncio", "prometheus_client", "pynvml"}
    program = f"import sys, {module}\nprint(sorted({servers} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
