"""Which devices a program sees, what they say of themselves, and how functions are looked up."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.hardware.card_spec import DRIVER_VERSION
from fenka.hardware.nvml import Driver
from tests.hardware.client import MakeClient, MakeNode

NO_DEVICE = 100


@pytest.mark.parametrize(
    ("wish", "seen"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu,2", [1, 2]),
        ("", None),
        ("NoDevFiles", None),
        ("-1", None),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("0,,1", [0]),
        ("1,1", None),
        ("{0}", [0]),
        ("{2},{1}", [2, 1]),
        ("{1},0", [1, 0]),
        ("{0:.12}", [0]),
        ("GPU-", None),
        ("{1},GPU-00000000,{0}", [1]),
    ],
)
def test_visible_devices(
    make_node: MakeNode, make_client: MakeClient, wish: str, seen: list[int] | None
) -> None:
    """CUDA_VISIBLE_DEVICES takes ordinals and UUIDs and their prefixes, in the order given; an invalid
    token hides what follows, a card named twice hides everything."""
    node = make_node("T4,L4,A10")
    with Driver.open(node.library_dir) as driver:
        cards = driver.cards()
    client = make_client(node, CUDA_VISIBLE_DEVICES=wish.format(*(card.uuid for card in cards)))
    if seen is None:
        assert client.do("code(d.cuInit(0))") == NO_DEVICE
        return
    client.do("ok(d.cuInit(0))", "0")
    uuids = client.do(
        "[bytes(ok(d.cuDeviceGetUuid(n)).bytes).hex() for n in range(ok(d.cuDeviceGetCount()))]"
    )
    assert uuids == [cards[n].uuid.removeprefix("GPU-").replace("-", "") for n in seen]


def test_memory_is_charged_to_the_visible_card(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """With the devices reordered, device 0's memory is charged to the card that is device 0."""
    node = make_node("T4,L4")
    make_client(node, CUDA_VISIBLE_DEVICES="1,0").enter(0).do("ok(d.cuMemAlloc(1 << 30))", "0")
    with Driver.open(node.library_dir) as driver:
        assert [reading.used_mib for reading in driver.readings()] == [0, 1024]


@pytest.mark.parametrize("cuda", ["11.8", "12.4"])
def test_driver_version_is_the_nodes_before_initialisation(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path, cuda: str
) -> None:
    """Programs ask for it first of all; NVML and the cards' file say the same."""
    cards = tmp_path / "cards.toml"
    cards.write_text(f'version = 1\ncuda_version = "{cuda}"\n[[card]]\nmodel = "T4"\n')
    node = make_node(str(cards))
    with Driver.open(node.library_dir) as driver:
        assert driver.cuda_version == cuda
    major, minor = map(int, cuda.split("."))
    client = make_client(node)
    assert client.do("ok(d.cuDriverGetVersion())") == major * 1000 + minor * 10
    assert client.enter().do("ok(d.cuDriverGetVersion())") == major * 1000 + minor * 10


def test_a_device_describes_its_model(make_node: MakeNode, make_client: MakeClient) -> None:
    """Name, memory, capability and PCI address are the model's; an unknown attribute is 0."""
    node = make_node("T4,A100-80G")
    client = make_client(node)
    client.do("ok(d.cuInit(0))", "a = d.CUdevice_attribute", "0")
    assert client.do("ok(d.cuDriverGetVersion())") == 12040
    assert client.do("ok(d.cuDeviceGetName(64, 1)).decode().strip(' \\0')") == (
        "NVIDIA A100-SXM4-80GB"
    )
    assert client.do("ok(d.cuDeviceTotalMem(1))") == 81251 << 20
    assert client.do("ok(d.cuDeviceComputeCapability(1))") == [8, 0]
    assert client.do("ok(d.cuDeviceGetByPCIBusId(b'0000:02:00.0'))") == 1
    for name, value in [("MULTIPROCESSOR_COUNT", 108), ("WARP_SIZE", 32), ("PCI_BUS_ID", 2)]:
        assert client.do(f"ok(d.cuDeviceGetAttribute(a.CU_DEVICE_ATTRIBUTE_{name}, 1))") == value
    handle = "ctypes.c_int(7); driver.cuDeviceGetAttribute(ctypes.byref(found), 9999, 0)"
    client.do("import ctypes", "driver = ctypes.CDLL('libcuda.so.1')", f"found = {handle}", "0")
    assert client.do("found.value") == 0
    assert client.do("code(d.cuDeviceGet(2))") == 101  # CUDA_ERROR_INVALID_DEVICE


@pytest.mark.parametrize(
    ("name", "version", "flags", "symbol", "status"),
    [
        ("cuMemAlloc", 12000, 0, "cuMemAlloc_v2", 0),
        ("cuMemAlloc", 3010, 0, "cuMemAlloc", 0),
        ("cuMemAlloc", 1000, 0, None, 2),  # VERSION_NOT_SUFFICIENT
        ("cuCtxCreate", 11000, 0, "cuCtxCreate_v2", 0),
        ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3", 0),
        # v7000_ptds is no version of its own: this once answered with the first, 32-bit one
        ("cuMemcpyHtoD", 12000, 0, "cuMemcpyHtoD_v2", 0),
        ("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds", 0),
        ("cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz", 0),
        ("cuInit", 12000, 2, "cuInit", 0),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress", 0),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2", 0),
        ("cuGetProcAddress_v2", 12000, 0, "cuGetProcAddress_v2", 0),
        ("cuNoSuchThing", 12000, 0, None, 1),  # SYMBOL_NOT_FOUND
    ],
)
def test_lookup_by_name_and_version(
    make_node: MakeNode, name: str, version: int, flags: int, symbol: str | None, status: int
) -> None:
    """cuGetProcAddress answers with the symbol of the newest version that the caller knows."""
    driver = ctypes.CDLL(str(make_node("T4").library_dir / "libcuda.so.1"))
    function, answer = ctypes.c_void_p(), ctypes.c_int(-1)
    code = driver.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(function), version, ctypes.c_uint64(flags), ctypes.byref(answer)
    )
    expected = ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value if symbol else None
    assert (code, function.value, answer.value) == (0, expected, status)


def test_unsupported_function_returns_not_supported(make_node: MakeNode) -> None:
    """A function without an implementation answers CUDA_ERROR_NOT_SUPPORTED, and so does NVML's."""
    node = make_node("T4")
    driver = ctypes.CDLL(str(node.library_dir / "libcuda.so.1"))
    assert driver.cuTexRefCreate() == 801
    assert driver.cuMemcpyBatchAsync_ptsz() == 801
    with Driver.open(node.library_dir):
        import pynvml

        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetEncoderUtilization(pynvml.nvmlDeviceGetHandleByIndex(0))


def test_errors_have_names(make_node: MakeNode) -> None:
    """Every CUresult that cuda-bindings knows has a name and a sentence here."""
    from cuda.bindings import driver as bindings

    driver = ctypes.CDLL(str(make_node("T4").library_dir / "libcuda.so.1"))
    text = ctypes.c_char_p()
    for result in bindings.CUresult:
        assert driver.cuGetErrorName(int(result), ctypes.byref(text)) == 0
        assert text.value == result.name.encode()
        assert driver.cuGetErrorString(int(result), ctypes.byref(text)) == 0
        assert text.value
    assert driver.cuGetErrorName(12345, ctypes.byref(text)) == 1


def test_the_library_finds_its_node_without_environment(make_node: MakeNode) -> None:
    """Loaded by its path under an empty environment, the driver knows which node it belongs to."""
    node = make_node("T4*3")
    program = (
        "import ctypes, sys; d = ctypes.CDLL(sys.argv[1]); n = ctypes.c_int();"
        "print(d.cuInit(0), d.cuDeviceGetCount(ctypes.byref(n)), n.value)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, node.library_dir / "libcuda.so.1"],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "0 0 3\n"


def test_library_outside_a_node_uses_the_environment(make_node: MakeNode) -> None:
    """From elsewhere the driver goes by FENKA_SIMULATED_NODE, and without it says not ready.

    (Unless root's daemon has a node at the fixed place, see tests/native/test_simdriver_contained.py.)
    """
    node = make_node("T4")
    library = (node.library_dir / "libcuda.so.1").resolve()
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))"

    def say(**environment: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program, library],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert say(FENKA_SIMULATED_NODE=str(node.directory)) == "0\n"
    if not Path("/run/fenka/simulated").exists():
        assert say() == "802\n"  # CUDA_ERROR_SYSTEM_NOT_READY


def test_older_cuda_version_has_no_newer_functions(make_node: MakeNode, tmp_path: Path) -> None:
    """cuGetProcAddress offers of a node with 12.4 what a driver of 12.4 offers."""
    file = tmp_path / "cards.toml"
    file.write_text('version = 1\ncuda_version = "12.4"\n[[card]]\nmodel = "T4"\n')
    node = make_node(str(file))
    program = """
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
def found(name):
    pointer, status = ctypes.c_void_p(), ctypes.c_int()
    driver.cuGetProcAddress_v2(name, ctypes.byref(pointer), 13050, ctypes.c_uint64(0), ctypes.byref(status))
    return bool(pointer.value)
print(found(b"cuGreenCtxCreate"), found(b"cuMemGetDefaultMemPool"), found(b"cuProfilerStart"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(node.library_dir / "libcuda.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "False", "True"]


def test_libraries_have_all_names_of_a_real_driver(make_node: MakeNode) -> None:
    """With the version as NVIDIA's tools look for it, and without one as linkers do."""
    names = {path.name for path in make_node("T4").library_dir.iterdir()}
    for library in ("libcuda.so", "libnvidia-ml.so"):
        assert {library, f"{library}.1", f"{library}.{DRIVER_VERSION}"} <= names
