"""CUDA programs in the instances of a simulated card."""

import pynvml
import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MIB, MakeClient, MakeNode
from tests.hardware.test_simulated_mig import IN_USE, code
from tests.hardware.test_simulated_time import ENDLESS, KERNEL, LAUNCH, kernel
from tests.waiting import wait_until

ONE, TWO, THREE = 19, 14, 9
"""Profiles of an A100 by nvidia-smi's numbers."""
WIDEST = {ONE: 0, TWO: 1, THREE: 2}
OUT_OF_MEMORY, NO_DEVICE, INVALID_DEVICE = 2, 100, 101
DEVICE_UNAVAILABLE = 46


@pytest.fixture
def node(make_node: MakeNode) -> SimulatedNode:
    """Return a node with one A100."""
    return make_node("A100-40G")


def divide(node: SimulatedNode, *profiles: int) -> list[str]:
    """Enable MIG, create instances, and return all UUIDs in the order of GPU instance ids."""
    with Driver.open(node.library_dir):
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceSetMigMode(card, 1)
        for profile in profiles:
            gpu = pynvml.nvmlDeviceCreateGpuInstance(card, profile)
            pynvml.nvmlGpuInstanceCreateComputeInstance(gpu, WIDEST[profile])
        handles = []
        while not code(
            lambda: handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, len(handles)))
        ):
            pass
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]


def test_program_sees_its_instance_as_a_card(make_client: MakeClient, node: SimulatedNode) -> None:
    """Name, memory, multiprocessors and UUID are the instance's; the old UUID function has the card's."""
    three, one = divide(node, THREE, ONE)
    client = make_client(CUDA_VISIBLE_DEVICES=one).enter()
    assert client.do("ok(d.cuDeviceGetCount())") == 1
    assert client.do("ok(d.cuDeviceGetName(64, 0)).partition(b'\\0')[0].decode()") == (
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    )
    assert client.do("ok(d.cuDeviceTotalMem(0))") == 4864 * MIB
    assert client.do("ok(d.cuMemGetInfo())[1]") == 4864 * MIB
    attribute = "d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"
    assert client.do(f"ok(d.cuDeviceGetAttribute({attribute}, 0))") == 14
    uuid = client.do("ok(d.cuDeviceGetUuid_v2(0)).bytes.hex()")
    assert uuid == one.removeprefix("MIG-").replace("-", "")
    assert client.do("ok(d.cuDeviceGetUuid(0)).bytes.hex()") != uuid
    assert three != one


@pytest.mark.parametrize("visible", ["{uuid:.12}", "{uuid},{other}", "0", "{old}"])
def test_instance_is_found_by_every_name_that_it_has(
    make_client: MakeClient, node: SimulatedNode, visible: str
) -> None:
    """A prefix; a list, of which a program sees one; the card's index; the name of older drivers."""
    uuid, other = divide(node, THREE, ONE)
    with Driver.open(node.library_dir) as driver:
        old = f"MIG-{driver.cards()[0].uuid}/2/0"
    wanted = visible.format(uuid=uuid, other=other, old=old)
    client = make_client(CUDA_VISIBLE_DEVICES=wanted).enter()
    assert client.do("ok(d.cuDeviceGetCount())") == 1
    assert client.do("ok(d.cuDeviceTotalMem(0))") == 20096 * MIB


def test_program_never_gets_the_card_when_it_is_divided(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Without instances there is no device; without a variable it is the first instance."""
    divide(node)
    assert make_client().do("code(d.cuInit(0))") == NO_DEVICE
    divide(node, TWO)
    assert make_client().enter().do("ok(d.cuDeviceTotalMem(0))") == 9984 * MIB
    unknown = make_client(CUDA_VISIBLE_DEVICES="MIG-00000000-0000-5000-8000-000000000000")
    assert unknown.do("code(d.cuInit(0))") == NO_DEVICE


def test_memory_is_limited_per_instance(make_client: MakeClient, node: SimulatedNode) -> None:
    """Two programs share one instance's memory; another instance has its own."""
    three, one = divide(node, THREE, ONE)
    first, second = (make_client(CUDA_VISIBLE_DEVICES=one).enter() for _ in range(2))
    other = make_client(CUDA_VISIBLE_DEVICES=three).enter()
    assert first.do(f"code(d.cuMemAlloc({3000 * MIB}))") == 0
    assert second.do(f"code(d.cuMemAlloc({3000 * MIB}))") == OUT_OF_MEMORY
    assert second.free_bytes() == 1864 * MIB
    assert other.do(f"code(d.cuMemAlloc({20000 * MIB}))") == 0
    with Driver.open(node.library_dir):
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        seen = {
            process.pid: (process.gpuInstanceId, process.computeInstanceId)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)
        }
        instance = pynvml.nvmlDeviceGetHandleByUUID(one)
        assert pynvml.nvmlDeviceGetMemoryInfo(instance).used == 3000 * MIB
        inside = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(instance)}
    assert seen == {first.pid: (7, 0), second.pid: (7, 0), other.pid: (2, 0)}
    assert inside == {first.pid, second.pid}


def test_used_instance_stays_when_others_come_and_go(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Its program runs on while a neighbour is destroyed; its own goes after the program's end."""
    three, one = divide(node, THREE, ONE)
    client = make_client(CUDA_VISIBLE_DEVICES=one).enter()
    with Driver.open(node.library_dir):
        card = pynvml.nvmlDeviceGetHandleByIndex(0)

        def destroy(gpu_id: int) -> int:
            gpu = pynvml.nvmlDeviceGetGpuInstanceById(card, gpu_id)
            compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(gpu, 0)
            return code(lambda: pynvml.nvmlComputeInstanceDestroy(compute)) or code(
                lambda: pynvml.nvmlGpuInstanceDestroy(gpu)
            )

        assert destroy(2) == 0
        assert divide(node, THREE) == [three, one]
        assert destroy(7) == IN_USE
        assert client.do("code(d.cuMemAlloc(1 << 20))") == 0
        client.kill()
        wait_until(lambda: destroy(7) == 0)


def test_program_cannot_enter_an_instance_that_was_destroyed(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """It was there at cuInit, and has gone before the first context."""
    (one,) = divide(node, ONE)
    client = make_client(CUDA_VISIBLE_DEVICES=one)
    client.do("code(d.cuInit(0))")
    with Driver.open(node.library_dir):
        gpu = pynvml.nvmlDeviceGetGpuInstanceById(pynvml.nvmlDeviceGetHandleByIndex(0), 13)
        compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(gpu, 0)
        pynvml.nvmlComputeInstanceDestroy(compute)
    assert client.do("code(d.cuDevicePrimaryCtxRetain(0))") == DEVICE_UNAVAILABLE


def test_mode_stays_pending_while_a_program_runs(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """The program goes on with the whole card; after its end the mode can be switched."""
    client = make_client().enter()
    with Driver.open(node.library_dir):
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceSetMigMode(card, 1) == IN_USE
        assert pynvml.nvmlDeviceGetMigMode(card) == [0, 1]
        assert client.do(f"code(d.cuMemAlloc({30000 * MIB}))") == 0
        client.kill()
        wait_until(lambda: pynvml.nvmlDeviceSetMigMode(card, 1) == 0)
        assert pynvml.nvmlDeviceGetMigMode(card) == [1, 1]


def test_kernels_take_as_long_as_the_instance_is_narrow(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """7 ms on 108 multiprocessors are 54 ms on 14, whatever another instance does."""
    three, one = divide(node, THREE, ONE)
    other = make_client(CUDA_VISIBLE_DEVICES=three).enter()
    other.do(KERNEL, kernel(ENDLESS), LAUNCH.format(stream="0"), "0")
    client = make_client(CUDA_VISIBLE_DEVICES=one).enter()
    client.do(KERNEL, kernel("k_us7000"), "a, b = (ok(d.cuEventCreate(0)) for _ in 'ab')", "0")

    def measured_ms() -> float:
        return float(
            client.do(
                "ok(d.cuEventRecord(a, 0))",
                LAUNCH.format(stream="0"),
                "ok(d.cuEventRecord(b, 0))",
                "ok(d.cuEventSynchronize(b))",
                "str(ok(d.cuEventElapsedTime(a, b)))",
            )
        )

    wait_until(lambda: measured_ms() == pytest.approx(54, abs=5))


def test_memory_of_one_instance_cannot_be_opened_in_another(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Within the instance it can."""
    three, one = divide(node, THREE, ONE)
    owner, near = (make_client(CUDA_VISIBLE_DEVICES=one).enter() for _ in range(2))
    far = make_client(CUDA_VISIBLE_DEVICES=three).enter()
    handle = owner.do(
        "import ctypes",
        "p = ok(d.cuMemAlloc(4096))",
        "(h := ok(d.cuIpcGetMemHandle(p)), ctypes.string_at(h.getPtr(), 64).hex())[1]",
    )
    receive = f"h = d.CUipcMemHandle(); ctypes.memmove(h.getPtr(), bytes.fromhex({handle!r}), 64)"
    opened = "code(d.cuIpcOpenMemHandle(h, 1))"
    assert near.do("import ctypes", receive, opened) == 0
    assert far.do("import ctypes", receive, opened) == INVALID_DEVICE
