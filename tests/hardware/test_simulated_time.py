"""Kernels on a simulated card take their time, one after another, and NVML reports it."""

import json
import signal
import time
from statistics import median

import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode
from tests.waiting import wait_until

KERNEL = "module = ok(d.cuModuleLoadData(b'an image'))"
ENDLESS = "k_us600000000"
"""A kernel that does not end during a test."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""

LAUNCH = "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, {stream}, 0, 0))"


def kernel(name: str) -> str:
    """Return the statement that gets a function of this name."""
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
    """Ten kernels of 20 ms, which events measure; then one that is not waited for."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us20000"), "import time", "s = ok(d.cuStreamCreate(0))", "0")
    client.do("a = ok(d.cuEventCreate(0))", "b = ok(d.cuEventCreate(0))", "0")

    def measured_ms() -> float:
        took = client.do(
            "begin = time.monotonic()",
            "ok(d.cuEventRecord(a, s))",
            f"for _ in range(10): {LAUNCH.format(stream='s')}",
            "ok(d.cuEventRecord(b, s))",
            "ok(d.cuStreamSynchronize(s))",
            "str(time.monotonic() - begin)",
        )
        assert float(took) >= 0.2
        assert client.do("[code(d.cuStreamQuery(s)), code(d.cuEventQuery(b))]") == [0, 0]
        return float(client.do("str(ok(d.cuEventElapsedTime(a, b)))"))

    # 10 x 20 ms; recording and launching are some microseconds apart, on a busy machine more
    wait_until(lambda: measured_ms() == pytest.approx(200, abs=20))
    client.do(kernel(ENDLESS), LAUNCH.format(stream="s"), "ok(d.cuEventRecord(b, s))", "0")
    assert client.do("[code(d.cuStreamQuery(s)), code(d.cuEventQuery(b))]") == [NOT_READY] * 2


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
    make_client: MakeClient,
    node: SimulatedNode,
    name: str,
    environment: dict[str, str],
    milliseconds: float,
) -> None:
    """Twenty in a row take twenty times as long, with the environment's default for other names."""
    client = make_client(**environment).enter()
    client.do(KERNEL, kernel(name), "a = ok(d.cuEventCreate(0))", "b = ok(d.cuEventCreate(0))", "0")
    # The first one keeps the card busy while the others are launched.
    client.do("long = ok(d.cuModuleGetFunction(module, b'long_us50000'))", "0")

    def measured_ms() -> float:
        before = node.busy_ns().get(client.pid, 0)
        elapsed = client.do(
            "ok(d.cuLaunchKernel(long, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))",
            "ok(d.cuEventRecord(a, 0))",
            f"for _ in range(20): {LAUNCH.format(stream=0)}",
            "ok(d.cuEventRecord(b, 0))",
            "ok(d.cuEventSynchronize(b))",
            "str(ok(d.cuEventElapsedTime(a, b)))",
        )
        assert node.busy_ns()[client.pid] - before == 50_000_000 + 20 * milliseconds * 1_000_000
        return float(elapsed)

    # On a busy machine the launches may take longer than the first kernel.
    wait_until(lambda: measured_ms() == pytest.approx(20 * milliseconds, abs=0.01))


def test_a_short_kernel_does_not_wait_for_a_long_one(make_client: MakeClient) -> None:
    """Programs take turns: 1 ms beside another's long kernel ends before that kernel."""
    first, other = make_client().enter(), make_client().enter()
    first.do(KERNEL, kernel(ENDLESS), "0")
    other.do(KERNEL, kernel("k_us1000"), "import time", "0")
    first.do(LAUNCH.format(stream=0), "0")
    waited = other.do(
        "begin = time.monotonic()",
        LAUNCH.format(stream=0),
        "ok(d.cuCtxSynchronize())",
        "str(time.monotonic() - begin)",
    )
    assert float(waited) >= 0.001
    assert first.do("code(d.cuStreamQuery(0))") == NOT_READY


def test_programs_share_a_card_evenly(make_client: MakeClient, node: SimulatedNode) -> None:
    """Kernels of 20 ms and of 0.2 ms, queued side by side: each program has half of the card, and what
    each has had is known exactly."""
    large, small = make_client().enter(), make_client().enter()
    large.do(KERNEL, kernel("k_us20000"), "0")
    small.do(KERNEL, kernel("k_us200"), "a, b = (ok(d.cuEventCreate(0)) for _ in 'ab')", "0")
    small.do("first = ok(d.cuModuleGetFunction(module, b'k_us500000'))", "0")
    large.do(f"for _ in range(2000): {LAUNCH.format(stream=0)}", "0")
    before = node.busy_ns()
    # The first kernel keeps the program's queue filled while the others are launched.
    small.do(
        "ok(d.cuEventRecord(a, 0))",
        "ok(d.cuLaunchKernel(first, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))",
        f"for _ in range(2500): {LAUNCH.format(stream=0)}",
        "ok(d.cuEventRecord(b, 0))",
        "ok(d.cuEventSynchronize(b))",
        "0",
    )
    after = node.busy_ns()
    # With 2500 kernels of 0.2 ms these are 1000 ms, and take twice as long
    assert after[small.pid] == 1_000_000_000
    assert float(small.do("str(ok(d.cuEventElapsedTime(a, b)))")) == pytest.approx(2000, rel=0.1)
    assert after[large.pid] - before[large.pid] >= 0.85 * 1_000_000_000


def test_alone_a_program_has_all_of_the_card(make_client: MakeClient, node: SimulatedNode) -> None:
    """When the other one is killed its queue goes with it, and its turns."""
    hog, program = make_client().enter(), make_client().enter()
    hog.do(KERNEL, kernel("k_us60000000"), LAUNCH.format(stream=0), "0")
    program.do(
        KERNEL, kernel("k_us50000"), LAUNCH.format(stream=0), "ok(d.cuCtxSynchronize())", "0"
    )
    hog.kill()
    wait_until(lambda: list(node.busy_ns()) == [program.pid])
    # The first ten keep the program's queue filled while the others are launched.
    elapsed = program.do(
        "a, b = (ok(d.cuEventCreate(0)) for _ in 'ab')",
        f"for _ in range(10): {LAUNCH.format(stream=0)}",
        "ok(d.cuEventRecord(a, 0))",
        f"for _ in range(4): {LAUNCH.format(stream=0)}",
        "ok(d.cuEventRecord(b, 0))",
        "ok(d.cuEventSynchronize(b))",
        "str(ok(d.cuEventElapsedTime(a, b)))",
    )
    # 4 x 50 ms, and nothing in between
    assert float(elapsed) == pytest.approx(200, abs=0.01)
    assert node.busy_ns() == {program.pid: 750_000_000}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_a_program_that_was_struck_down(
    make_client: MakeClient, sign: signal.Signals
) -> None:
    """Programs are killed or stopped while they launch as fast as they can, so wherever they are in
    the driver; the others' kernels go on."""
    survivor = make_client().enter()
    survivor.do(KERNEL, kernel("k_us100"), "0")
    for _ in range(6):
        struck = make_client().enter()
        struck.do(KERNEL, kernel("k_us0"), "0")
        assert struck.process.stdin is not None
        struck.process.stdin.write(
            json.dumps([f"while True: {LAUNCH.format(stream=0)}", "0"]) + "\n"
        )
        struck.process.stdin.flush()
        survivor.do(LAUNCH.format(stream=0), "ok(d.cuCtxSynchronize())", "0")
        struck.process.send_signal(sign)
        survivor.do(
            f"for _ in range(20): {LAUNCH.format(stream=0)}", "ok(d.cuCtxSynchronize())", "0"
        )


def test_time_of_a_killed_program_is_not_forgotten(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Killed in its first kernel: the node knows how long that ran, and the driver's samples show it."""
    client = make_client().enter()
    before_us = time.time_ns() // 1000
    begin = time.monotonic_ns()
    client.do(KERNEL, kernel("k_us600000000"), LAUNCH.format(stream=0), "0")
    with Driver.open(node.library_dir) as driver:
        uuid = driver.cards()[0].uuid
        wait_until(lambda: driver.readings()[0].utilisation)
        client.kill()
        wait_until(lambda: driver.processes() == ())
        samples = driver.busy_samples(uuid, before_us)
    assert samples is not None
    assert samples[1][client.pid] > 0
    assert 0 < node.past_busy_ns()[client.pid] <= time.monotonic_ns() - begin


def test_waiting_for_another_cards_event_waits(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """A stream of card 1 told to wait for card 0's work starts after it."""
    client = make_client(make_node("T4*2")).enter()
    client.do(KERNEL, kernel("k_us200000"), "e = ok(d.cuEventCreate(0))", "import time", "0")
    client.do("begin = time.monotonic()", LAUNCH.format(stream=0), "ok(d.cuEventRecord(e, 0))", "0")
    client.do(
        "ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))", KERNEL, kernel("k_us0"), "0"
    )
    client.do(
        "ok(d.cuStreamWaitEvent(0, e, 0))", LAUNCH.format(stream=0), "ok(d.cuCtxSynchronize())", "0"
    )
    assert client.do("time.monotonic() - begin >= 0.2") == 1


def test_half_the_time_reads_as_half_the_utilisation(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """20 ms of every 40: NVML says about 50 %, for the card and for the process, and power between."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us20000"), f"exec({STEADY!r}, globals())", "0")
    wait_until(lambda: client.do("time.monotonic() - begun > 1.5"))
    with Driver.open(node.library_dir) as driver:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByIndex(0)

        def half() -> bool:
            seen = [driver.readings()[0] for _ in range(5)]
            (sample,) = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
            assert sample.pid == client.pid
            used = median(reading.utilisation or 0 for reading in seen)
            # idle 10 W, limit 70 W, idle 30 C
            return (
                abs(used - 50) <= 8
                and abs(sample.smUtil - 50) <= 12
                and 30 < (seen[0].power_w or 0) < 50
                and 40 < (seen[0].temperature_c or 0) < 65
            )

        # On a busy machine a second may pass in which the program launches less.
        wait_until(half)
        client.kill()
        wait_until(lambda: driver.readings()[0].utilisation == 0)


def test_a_full_queue_reads_as_full_utilisation(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Minutes of work launched at once keep the card at 100 % and its power at the limit."""
    client = make_client().enter()
    client.do(KERNEL, kernel("k_us100000"), f"for _ in range(6000): {LAUNCH.format(stream=0)}", "0")
    with Driver.open(node.library_dir) as driver:
        wait_until(lambda: driver.readings()[0].utilisation == 100)
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
        "ok(d.cuCtxSynchronize())",
        "0",
    )
    assert client.do("[n for n, _ in called]") == [1, 2]
    assert client.do("called[0][1] >= 0.05") == 1
    client.do(kernel(ENDLESS), LAUNCH.format(stream=0), "0")
    client.do("driver.cuLaunchHostFunc(None, note, ctypes.c_void_p(3))", "0")
    assert client.do("[n for n, _ in called]") == [1, 2]


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
