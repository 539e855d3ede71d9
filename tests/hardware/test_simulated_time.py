"""Kernels on a simulated card take their time, one after another, and NVML reports it."""

from statistics import median

import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated import SimulatedNode
from tests.hardware.gpu_kit import MakeClient, until

KERNEL = "module = ok(d.cuModuleLoadData(b'an image'))"
LAUNCH = "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, {stream}, 0, 0))"


def kernel(name: str) -> str:
    """The statement that gets a function of this name."""
    return f"f = ok(d.cuModuleGetFunction(module, b'{name}'))"


# Every 40 ms by the clock, so that a late one is followed by an early one.
STEADY = """
import threading, time
def work():
    ok(d.cuCtxSetCurrent(context))
    begin, n = time.monotonic(), 0
    while True:
        ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)); n += 1
        time.sleep(max(0, begin + n * 0.040 - time.monotonic()))
begun = time.monotonic()
threading.Thread(target=work, daemon=True).start()
"""


def test_a_launch_returns_at_once_and_a_synchronise_waits(make_client: MakeClient) -> None:
    """Ten kernels of 20 ms: launching takes far less than running, events measure the running."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us20000"), "import time", "s = ok(d.cuStreamCreate(0))", "0")
    client.do("a = ok(d.cuEventCreate(0))", "b = ok(d.cuEventCreate(0))", "0")
    client.do(
        "begin = time.monotonic()",
        "ok(d.cuEventRecord(a, s))",
        f"for _ in range(10): {LAUNCH.format(stream='s')}",
        "ok(d.cuEventRecord(b, s))",
        "launched = time.monotonic() - begin",
        "pending = code(d.cuStreamQuery(s)), code(d.cuEventQuery(b))",
        "ok(d.cuStreamSynchronize(s))",
        "done = time.monotonic() - begin",
        "0",
    )
    not_ready = 600  # CUDA_ERROR_NOT_READY
    assert client.do("list(pending)") == [not_ready, not_ready]
    assert client.do("[launched < 0.1, done >= 0.2]") == [True, True]
    # 10 x 20 ms; recording and launching are some microseconds apart
    assert float(client.do("str(ok(d.cuEventElapsedTime(a, b)))")) == pytest.approx(200, abs=20)
    assert client.do("code(d.cuStreamQuery(s))") == 0


@pytest.mark.parametrize(
    ("name", "environment", "milliseconds"),
    [
        ("k_us3000", {}, 3.0),
        ("anything", {}, 0.05),
        ("anything", {"FENKA_SIMULATED_KERNEL_US": "7000"}, 7.0),
        ("k_us3000", {"FENKA_SIMULATED_KERNEL_US": "7000"}, 3.0),
        ("k_us3000_v2", {}, 0.05),  # only at the end of the name
    ],
)
def test_a_kernel_takes_as_long_as_its_name_says(
    make_client: MakeClient, name: str, environment: dict[str, str], milliseconds: float
) -> None:
    """Twenty in a row take twenty times as long, with the environment's default for other names."""
    client = make_client(**environment).enter()
    client.do(KERNEL, kernel(name), "a = ok(d.cuEventCreate(0))", "b = ok(d.cuEventCreate(0))", "0")
    # The first one keeps the card busy while the others are launched.
    client.do("long = ok(d.cuModuleGetFunction(module, b'long_us50000'))", "0")
    client.do(
        "ok(d.cuLaunchKernel(long, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))",
        "ok(d.cuEventRecord(a, 0))",
        f"for _ in range(20): {LAUNCH.format(stream=0)}",
        "ok(d.cuEventRecord(b, 0))",
        "ok(d.cuEventSynchronize(b))",
        "0",
    )
    elapsed = float(client.do("str(ok(d.cuEventElapsedTime(a, b)))"))
    assert elapsed == pytest.approx(20 * milliseconds, abs=0.01)


def test_programs_take_turns_on_one_card(make_client: MakeClient) -> None:
    """What one program launched delays the other's kernel."""
    one, other = make_client().enter(), make_client().enter()
    one.do(KERNEL, kernel("k_us400000"), "0")
    other.do(KERNEL, kernel("k_us1000"), "import time", "0")
    one.do(LAUNCH.format(stream=0), "0")
    waited = other.do(
        "begin = time.monotonic()",
        LAUNCH.format(stream=0),
        "ok(d.cuCtxSynchronize())",
        "str(time.monotonic() - begin)",
    )
    assert float(waited) > 0.2
    assert one.do("code(d.cuStreamQuery(0))") == 0


def test_half_the_time_reads_as_half_the_utilisation(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """20 ms of every 40: NVML says about 50 %, for the card and for the process, and power between."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us20000"), f"exec({STEADY!r}, globals())", "0")
    until(lambda: client.do("time.monotonic() - begun > 1.5"))
    with Driver.open(node.library_dir) as driver:
        seen = [driver.readings()[0] for _ in range(5)]
        assert median(reading.utilisation or 0 for reading in seen) == pytest.approx(50, abs=8)
        # idle 10 W, limit 70 W, idle 30 C
        assert 30 < (seen[0].power_w or 0) < 50
        assert 40 < (seen[0].temperature_c or 0) < 65
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        (sample,) = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
        assert sample.pid == client.pid
        assert sample.smUtil == pytest.approx(50, abs=12)
        client.kill()
        until(lambda: driver.readings()[0].utilisation == 0, within_s=3.0)


def test_a_full_queue_reads_as_full_utilisation(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Seconds of work launched at once keep the card at 100 % and its power at the limit."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us100000"), f"for _ in range(40): {LAUNCH.format(stream=0)}", "0")
    with Driver.open(node.library_dir) as driver:
        until(lambda: driver.readings()[0].utilisation == 100, within_s=3.0)
        # the window still reaches to where 100 was rounded up from: 99.5 % of 10 to 70 W
        assert (driver.readings()[0].power_w or 0) >= 69.7


def test_host_functions_run_in_their_turn(make_client: MakeClient) -> None:
    """A stream calls the program's function after the kernel before it, and synchronising waits."""
    client = make_client().enter()
    client.do(
        KERNEL,
        kernel("k_us50000"),
        "import ctypes, time",
        "called = []",
        "begin = time.monotonic()",
        "note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)("
        "lambda data: called.append((data, time.monotonic() - begin)))",
        "driver = ctypes.CDLL('libcuda.so.1')",
        LAUNCH.format(stream=0),
        "[driver.cuLaunchHostFunc(None, note, ctypes.c_void_p(n)) for n in (1, 2)]",
        "early = len(called)",
        "ok(d.cuCtxSynchronize())",
        "0",
    )
    assert client.do("early") == 0
    assert client.do("[n for n, _ in called]") == [1, 2]
    assert client.do("called[0][1] >= 0.05") == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("d.cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, 0, 0, 0)", 1),  # 1024 threads at most
        ("d.cuLaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, 0, 0, 0)", 1),
        ("d.cuLaunchKernel(module, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)", 400),  # INVALID_HANDLE
        ("d.cuStreamSynchronize(gone)", 400),
        ("d.cuEventElapsedTime(event, event)", 400),  # never recorded
        ("d.cuModuleLoadData(b'')", 200),  # INVALID_IMAGE
        ("d.cuModuleGetFunction(ptx, b'absent')", 500),  # NOT_FOUND
        ("d.cuModuleGetFunction(ptx, b'present')", 0),
    ],
)
def test_wrong_launches_are_refused(make_client: MakeClient, call: str, error: int) -> None:
    """Impossible shapes, stale and foreign handles get the driver's error and crash nothing."""
    client = make_client().enter()
    client.do(
        KERNEL,
        kernel("k"),
        "gone = ok(d.cuStreamCreate(0))",
        "ok(d.cuStreamDestroy(gone))",
        "event = ok(d.cuEventCreate(0))",
        "ptx = ok(d.cuModuleLoadData(b'.version 7.0 .visible .entry present() {}'))",
        "0",
    )
    assert client.do(f"code({call})") == error
