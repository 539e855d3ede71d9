"""`fenka notebook` with a real Jupyter server and a real kernel."""

import http.cookiejar
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from fenka.jobs.kernel import Kernel, KernelFailed
from tests.waiting import WAIT_S
from tests.workstation.conftest import Workstation, eventually

LOOK = (
    "from cuda.bindings import driver as cuda\n"
    "cuda.cuInit(0)\n"
    "cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])\n"
    "print(cuda.cuMemGetInfo()[2] >> 20, cuda.cuMemAlloc(4400 << 20)[0].name)\n"
)


@pytest.fixture
def t4(t4: Workstation) -> Workstation:
    """A T4, and the Jupyter that came with fenka on the PATH."""
    t4.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return t4


def test_kernel_is_limited_when_a_notebook_runs(t4: Workstation) -> None:
    """The kernel, a grandchild of `fenka notebook`, sees the limit and cannot exceed it."""
    printed = t4.ok("notebook", "--gpu-mem", "4", "--name", "nb", "--detach")
    url = printed.removeprefix("nb: ").strip()
    assert url in t4.ok("ps")
    kernel = Kernel(url)
    assert kernel.run(LOOK) == "4308 CUDA_ERROR_OUT_OF_MEMORY\n"
    with pytest.raises(KernelFailed, match="ZeroDivisionError"):
        kernel.run("1 / 0")
    kernel.close()
    assert t4.ok("stop", "nb") == "nb: stopped\n"
    assert t4.jobs() == {}


def test_login_is_required_when_a_password_is_set(t4: Workstation) -> None:
    """With PASSWORD set the URL has no token, and only the password logs in."""
    t4.environment["PASSWORD"] = "mypassw0rd"
    printed = t4.ok("notebook", "--gpu-mem", "4", "--name", "nb", "--detach")
    url = printed.removeprefix("nb: ").strip()
    assert "token" not in url
    assert _login(url, "wrong") == 401
    assert _login(url, "mypassw0rd") == []


def test_notebook_ends_when_its_server_ends(t4: Workstation) -> None:
    """SIGTERM to the command ends the server and releases the slice."""
    words = [sys.executable, "-m", "fenka", "notebook", "--gpu-mem", "4"]
    with subprocess.Popen(
        words, env=t4.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        assert re.fullmatch(
            r"notebook: http://127\.0\.0\.1:\d+/lab\?token=\w+\n", process.stdout.readline()
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    eventually(lambda: not t4.jobs())


def test_ports_differ_when_notebooks_start_together(t4: Workstation) -> None:
    """Each notebook has its own port and URL."""
    fenka = [sys.executable, "-m", "fenka", "notebook", "--gpu-mem", "2", "--detach", "--name"]
    starting = [
        subprocess.Popen(
            [*fenka, name],
            env=t4.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    printed = [process.communicate() for process in starting]
    assert [error for _, error in printed] == ["", "", ""]
    ports = {urllib.parse.urlsplit(line.split(": ")[1]).port for line, _ in printed}
    assert len(ports) == 3
    for line, _ in printed:
        Kernel(line.split(": ")[1].strip()).close()


def test_notebook_fails_when_its_directory_is_missing(t4: Workstation) -> None:
    """A missing directory is reported before anything starts."""
    result = t4.fenka("notebook", "--gpu-mem", "1", "--directory", "/no/such")
    assert (result.returncode, result.stderr) == (2, "fenka: /no/such is not a directory\n")


def _login(url: str, password: str) -> object:
    """Return the running kernels after logging in with the password, else the HTTP status."""
    parts = urllib.parse.urlsplit(url)
    base = f"http://{parts.netloc}"
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"{base}/login", timeout=WAIT_S).read()
    xsrf = next(cookie.value for cookie in jar if cookie.name == "_xsrf")
    form = urllib.parse.urlencode({"password": password, "_xsrf": xsrf}).encode()
    try:
        opener.open(f"{base}/login", data=form, timeout=WAIT_S).read()
        with opener.open(f"{base}/api/kernels", timeout=WAIT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as why:
        return why.code
