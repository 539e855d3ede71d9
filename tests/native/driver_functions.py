"""Which functions of the driver are replaced, which need not be and why, and which nobody has classified.

`python -m tests.native.driver_functions` reads the headers of all drivers from NVIDIA's packages (network),
and writes driver_functions.json and docs/reference/drivers.md. Headers are never committed: names and
versions only.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.native.clients import HEADERS
from tests.native.test_shim_rows import HOOKS

# These read, wait, compare, copy between what was taken before, or free what was never charged. None of
# these words may hide one of TELLING: such a name has to be named below.
HARMLESS = re.compile(
    r"""cu(
      \w*Get([A-Z]\w*)? | Memcpy\w* | Memset\w* | \w*Query\w* | \w*Synchronize | \w*Destroy\w* | \w*Unload
    | \w*Unregister\w* | \w*Unmap\w* | \w*Wait\w* | \w*Record\w* | \w*Signal\w* | \w*Release\w*
    | Graph\w*Node(Set|Copy)\w* | GraphExec(Update|\w+SetParams) | Graph(Remove\w+|DebugDotPrint)
    | (Module|Library)Enumerate\w+ | (Func|Kernel)Set\w+ | (Tex|Surf)RefSet\w+ | Param(Set\w+)
    | Stream(Set|Copy|Update|Write|End|Is)\w+ | StreamBatchMemOp | ThreadExchange\w+
    | Ctx(Push|Pop|Set)Current | CtxSet(CacheConfig|Flags|SharedMemConfig) | CtxResetPersistingL2Cache
    | DevicePrimaryCtxSetFlags | Device(CanAccessPeer|ComputeCapability) | EventElapsedTime
    | Occupancy\w+ | Logs\w+ | Coredump\w+ | PointerSetAttribute | FlushGPUDirectRDMAWrites
    )""",
    re.VERBOSE,
)
TELLING = re.compile(
    "Alloc|Create|Import|Map|Open|Load|Reserve|Pool|Array|Instantiate|Retain|Attach|Bind|Restore|Heap|Limit|Grow|Launch"
)

NO_MEMORY = "takes none of the card's memory, or some hundred bytes of the context's own"
HOST = "memory of the host"
ADDRESSES = "addresses only: what is put behind them was charged when it was taken"
ANOTHER = "memory that another process or another API took, and is charged for"
CODE = "code that was charged when its module or library was loaded"
ORDERED = "uses what was taken before"
NODE = "adds to a graph what takes no memory of its own"
POOL = "moves memory between a pool and the card; charged from allocation to free"
MANAGED = "moves managed memory, which is charged wherever it lies"

ALLOWED = {
    "cuArray3DGetDescriptor": NO_MEMORY,
    "cuArrayGetDescriptor": NO_MEMORY,
    "cuArrayGetMemoryRequirements": NO_MEMORY,
    "cuArrayGetPlane": NO_MEMORY,
    "cuArrayGetSparseProperties": NO_MEMORY,
    "cuCheckpointOperationComplete": ORDERED,
    "cuCheckpointProcessCheckpoint": ORDERED,
    "cuCheckpointProcessGetRestoreThreadId": NO_MEMORY,
    "cuCheckpointProcessLock": NO_MEMORY,
    "cuCheckpointProcessRestore": "what was charged stays charged while it is away",
    "cuCheckpointProcessUnlock": NO_MEMORY,
    "cuCtxDisablePeerAccess": ADDRESSES,
    "cuCtxEnablePeerAccess": ADDRESSES,
    "cuCtxFromGreenCtx": "another view of a context that is charged",
    "cuCtxGetLimit": NO_MEMORY,
    "cuDestroyExternalMemory": ANOTHER,
    "cuDevResourceGenerateDesc": NO_MEMORY,
    "cuDevSmResourceSplit": NO_MEMORY,
    "cuDevSmResourceSplitByCount": NO_MEMORY,
    "cuDeviceGetDefaultMemPool": NO_MEMORY,
    "cuDeviceGetMemPool": NO_MEMORY,
    "cuDeviceRegisterAsyncNotification": NO_MEMORY,
    "cuDeviceSetGraphMemAttribute": NO_MEMORY,
    "cuDeviceSetMemPool": "a pool is asked for its card when it is used",
    "cuEGLStreamConsumerAcquireFrame": ANOTHER,
    "cuEGLStreamConsumerConnect": NO_MEMORY,
    "cuEGLStreamConsumerConnectWithFlags": NO_MEMORY,
    "cuEGLStreamConsumerDisconnect": NO_MEMORY,
    "cuEGLStreamProducerConnect": NO_MEMORY,
    "cuEGLStreamProducerDisconnect": NO_MEMORY,
    "cuEGLStreamProducerPresentFrame": ORDERED,
    "cuEGLStreamProducerReturnFrame": ORDERED,
    "cuEventCreate": NO_MEMORY,
    "cuEventCreateFromEGLSync": NO_MEMORY,
    "cuExternalMemoryGetMappedBuffer": ANOTHER,
    "cuExternalMemoryGetMappedMipmappedArray": ANOTHER,
    "cuFabricCpyBatchAsync": ORDERED,
    "cuFuncIsLoaded": NO_MEMORY,
    "cuFuncLoad": CODE,
    "cuGLInit": NO_MEMORY,
    "cuGLMapBufferObject": ANOTHER,
    "cuGLMapBufferObjectAsync": ANOTHER,
    "cuGLRegisterBufferObject": ANOTHER,
    "cuGLSetBufferObjectMapFlags": ANOTHER,
    "cuGraphAddBatchMemOpNode": NODE,
    "cuGraphAddChildGraphNode": "a child's memory stays charged with the child",
    "cuGraphAddDependencies": NODE,
    "cuGraphAddEmptyNode": NODE,
    "cuGraphAddEventRecordNode": NODE,
    "cuGraphAddEventWaitNode": NODE,
    "cuGraphAddExternalSemaphoresSignalNode": NODE,
    "cuGraphAddExternalSemaphoresWaitNode": NODE,
    "cuGraphAddHostNode": NODE,
    "cuGraphAddKernelNode": NODE,
    "cuGraphAddMemcpyNode": NODE,
    "cuGraphAddMemsetNode": NODE,
    "cuGraphClone": "graphs with memory nodes cannot be cloned",
    "cuGraphConditionalHandleCreate": NO_MEMORY,
    "cuGraphCreate": NO_MEMORY,
    "cuGraphMemAllocNodeGetParams": NO_MEMORY,
    "cuGraphNodeFindInClone": NO_MEMORY,
    "cuGraphRetainUserObject": NO_MEMORY,
    "cuGraphUpload": "a graph's memory is charged from its making on",
    "cuGraphicsEGLRegisterImage": ANOTHER,
    "cuGraphicsGLRegisterBuffer": ANOTHER,
    "cuGraphicsGLRegisterImage": ANOTHER,
    "cuGraphicsMapResources": ANOTHER,
    "cuGraphicsResourceGetMappedEglFrame": ANOTHER,
    "cuGraphicsResourceGetMappedMipmappedArray": ANOTHER,
    "cuGraphicsResourceGetMappedPointer": ANOTHER,
    "cuGraphicsResourceSetMapFlags": ANOTHER,
    "cuGraphicsSubResourceGetMappedArray": ANOTHER,
    "cuGraphicsUnmapResources": ANOTHER,
    "cuGraphicsVDPAURegisterOutputSurface": ANOTHER,
    "cuGraphicsVDPAURegisterVideoSurface": ANOTHER,
    "cuGreenCtxStreamCreate": NO_MEMORY,
    "cuImportExternalMemory": ANOTHER,
    "cuImportExternalSemaphore": NO_MEMORY,
    "cuIpcOpenEventHandle": NO_MEMORY,
    "cuLaunchHostFunc": "work of the host, not of the card",
    "cuLinkAddData": HOST,
    "cuLinkAddFile": HOST,
    "cuLinkComplete": HOST,
    "cuLinkCreate": HOST,
    "cuLogicalEndpointAddDevice": NO_MEMORY,
    "cuLogicalEndpointBindAddr": ADDRESSES,
    "cuLogicalEndpointBindMem": ADDRESSES,
    "cuLogicalEndpointCreate": ADDRESSES,
    "cuLogicalEndpointExport": NO_MEMORY,
    "cuLogicalEndpointGetLimits": NO_MEMORY,
    "cuLogicalEndpointIdReserve": NO_MEMORY,
    "cuLogicalEndpointImport": ANOTHER,
    "cuLogicalEndpointUnbind": ADDRESSES,
    "cuMemAddressFree": ADDRESSES,
    "cuMemAddressReserve": ADDRESSES,
    "cuMemAdvise": MANAGED,
    "cuMemAllocHost": HOST,
    "cuMemBatchDecompressAsync": ORDERED,
    "cuMemDiscardAndPrefetchBatchAsync": MANAGED,
    "cuMemDiscardBatchAsync": MANAGED,
    "cuMemFreeHost": HOST,
    "cuMemGetAllocationGranularity": NO_MEMORY,
    "cuMemGetAllocationPropertiesFromHandle": NO_MEMORY,
    "cuMemHostAlloc": HOST,
    "cuMemHostRegister": HOST,
    "cuMemPoolExportPointer": NO_MEMORY,
    "cuMemPoolExportToShareableHandle": NO_MEMORY,
    "cuMemPoolGetAccess": NO_MEMORY,
    "cuMemPoolGetAttribute": NO_MEMORY,
    "cuMemPoolImportFromShareableHandle": ANOTHER,
    "cuMemPoolImportPointer": ANOTHER,
    "cuMemPoolSetAccess": ADDRESSES,
    "cuMemPrefetchAsync": MANAGED,
    "cuMemPrefetchBatchAsync": MANAGED,
    "cuMemSetAccess": ADDRESSES,
    "cuMemSetMemPool": "a pool is asked for its card when it is used",
    "cuMipmappedArrayGetLevel": NO_MEMORY,
    "cuMipmappedArrayGetMemoryRequirements": NO_MEMORY,
    "cuMipmappedArrayGetSparseProperties": NO_MEMORY,
    "cuModuleGetLoadingMode": NO_MEMORY,
    "cuMulticastAddDevice": NO_MEMORY,
    "cuMulticastBindAddr": ADDRESSES,
    "cuMulticastBindMem": ADDRESSES,
    "cuMulticastCreate": ADDRESSES,
    "cuMulticastUnbind": ADDRESSES,
    "cuProfilerInitialize": NO_MEMORY,
    "cuProfilerStart": NO_MEMORY,
    "cuProfilerStop": NO_MEMORY,
    "cuStreamAddCallback": NO_MEMORY,
    "cuStreamAttachMemAsync": MANAGED,
    "cuStreamBeginCapture": NO_MEMORY,
    "cuStreamBeginCaptureToCig": "records work for a graphics queue, and takes no memory of its own",
    "cuStreamBeginCaptureToGraph": NO_MEMORY,
    "cuStreamBeginRecaptureToGraph": NO_MEMORY,
    "cuStreamCreate": NO_MEMORY,
    "cuStreamCreateWithPriority": NO_MEMORY,
    "cuSurfObjectCreate": NO_MEMORY,
    "cuSurfRefGetArray": NO_MEMORY,
    "cuSurfRefSetArray": NO_MEMORY,
    "cuTensorMapEncodeIm2col": HOST,
    "cuTensorMapEncodeIm2colWide": HOST,
    "cuTensorMapEncodeTiled": HOST,
    "cuTensorMapReplaceAddress": HOST,
    "cuTensorMapSetAllocationClass": HOST,
    "cuTexObjectCreate": NO_MEMORY,
    "cuTexRefCreate": NO_MEMORY,
    "cuTexRefGetArray": NO_MEMORY,
    "cuTexRefGetMipmappedArray": NO_MEMORY,
    "cuTexRefSetArray": NO_MEMORY,
    "cuTexRefSetMipmappedArray": NO_MEMORY,
    "cuUserObjectCreate": NO_MEMORY,
    "cuUserObjectRetain": NO_MEMORY,
}
"""Functions that are left to the driver, without suffix of version or stream; and why they may be."""


def declared(header: str) -> set[str]:
    """Every function of the driver that a header declares, in all its versions."""
    text = subprocess.run(
        ["gcc", "-E", "-D__CUDA_API_VERSION_INTERNAL", f"-isystem{HEADERS}", "-"],
        input=header,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"\bCUresult\s+(cu[A-Z]\w+)\s*\(", text))


def stem(name: str) -> str:
    """Without suffix of version or stream."""
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)


def unknown(names: set[str]) -> set[str]:
    """Those of which nobody has said whether they take memory."""
    left = {name for name in names if name not in HOOKS and stem(name) not in ALLOWED}
    return {name for name in left if not HARMLESS.fullmatch(stem(name)) or TELLING.search(name)}


GRAPHICS = {"cuGLCtxCreate", "cuGLCtxCreate_v2", "cuVDPAUCtxCreate", "cuVDPAUCtxCreate_v2"}
"""Replaced functions of headers that need OpenGL's or VDPAU's, which releases are not compared in."""


def declared_beside() -> set[str]:
    """Return the functions of the installed headers beside cuda.h, without those that only Windows has."""
    names = set()
    for header in ("cudaProfiler", "cudaGL", "cudaEGL", "cudaVDPAU"):
        text = (HEADERS / f"{header}.h").read_text()
        names |= set(re.findall(r"\bCUresult\s+CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
        names |= set(re.findall(r"#\s*define\s+cu\w+\s+(cu[A-Z]\w+_v\d+)", text))
    return names - {"cuWGLGetDevice"}


NVML_TELLING = re.compile(
    "MemoryInfo|RunningProcess|HandleBy|DeviceGetCount|Process(es)?Util|MemoryLimits|Accounting|MigDevice"
    "|BAR1"
)
"""Names of functions that could report other programs' memory, or cards of others."""

_UNITS = "units of a chassis, not cards"
_TIME = "shares of time by process ID, and no memory"
_ENDED = "figures of ended processes, where root has switched that on"
_VIRTUAL = "for hosts of virtual cards"
_INSTANCES = "of instances, which a lease has or cannot see"

NVML_ALLOWED = {
    "nvmlDeviceClearAccountingPids": _ENDED,
    "nvmlDeviceGetAccountingBufferSize": _ENDED,
    "nvmlDeviceGetAccountingMode": _ENDED,
    "nvmlDeviceGetAccountingPids": _ENDED,
    "nvmlDeviceGetAccountingStats": _ENDED,
    "nvmlDeviceSetAccountingMode": _ENDED,
    "nvmlDeviceGetBAR1MemoryInfo": "the host's window onto the card",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": _INSTANCES,
    "nvmlDeviceGetMemoryLimits": "limits of a cgroup that the caller names",
    "nvmlDeviceSetMemoryLimits": "for root of the host only",
    "nvmlDeviceGetProcessUtilization": _TIME,
    "nvmlDeviceGetProcessesUtilizationInfo": _TIME,
    "nvmlUnitGetHandleByIndex": _UNITS,
}


@dataclass(frozen=True)
class Release:
    """A branch of the driver, the CUDA version that came with it, and the packages with its headers."""

    driver: str
    cuda: str
    runtime: str
    nvml: str


RELEASES = (
    Release("535", "12.2", "nvidia-cuda-runtime-cu12==12.2.140", "nvidia-nvml-dev-cu12==12.2.140"),
    Release("550", "12.4", "nvidia-cuda-runtime-cu12==12.4.127", "nvidia-nvml-dev-cu12==12.4.127"),
    Release("560", "12.6", "nvidia-cuda-runtime-cu12==12.6.77", "nvidia-nvml-dev-cu12==12.6.77"),
    Release("570", "12.8", "nvidia-cuda-runtime-cu12==12.8.90", "nvidia-nvml-dev-cu12==12.8.90"),
    Release("580", "13.0", "nvidia-cuda-runtime==13.0.96", "nvidia-nvml-dev==13.0.87"),
    Release("590", "13.1", "nvidia-cuda-runtime==13.1.80", "nvidia-nvml-dev==13.1.115"),
    Release("595", "13.2", "nvidia-cuda-runtime==13.2.86", "nvidia-nvml-dev==13.2.86"),
    Release("610", "13.3", "nvidia-cuda-runtime==13.3.29", "nvidia-nvml-dev==13.3.29"),
    Release("615", "13.4", "nvidia-cuda-runtime==13.4.92", "nvidia-nvml-dev==13.4.92"),
    Release("620", "13.5", "nvidia-cuda-runtime==13.5.37", "nvidia-nvml-dev==13.5.37"),
)
"""By NVIDIA's table of toolkits and drivers. A driver of the branch has at least these functions."""

ROOT = Path(__file__).parents[2]
NAMES = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "reference" / "drivers.md"

NVML_HOOKS = set(
    re.findall(r"^NVML_HOOK\((\w+)\)", (ROOT / "native/shim/hooks.h").read_text(), re.M)
)

Names = dict[str, dict[str, list[str]]]
"""New functions by branch of the driver, and by `cuda` and `nvml`."""


def kind(name: str) -> str:
    """Return `replaced`, `harmless` or `unknown`."""
    if name.startswith("nvml"):
        if name in NVML_HOOKS:
            return "replaced"
        told = not NVML_TELLING.search(name) or "Vgpu" in name or stem(name) in NVML_ALLOWED
        return "harmless" if told else "unknown"
    if name in HOOKS:
        return "replaced"
    return "unknown" if unknown({name}) else "harmless"


def declared_in(header: Path) -> set[str]:
    """Return all functions that a header of CUDA or NVML declares."""
    if header.name == "nvml.h":
        text = _preprocessed(["-DNVML_NO_UNVERSIONED_FUNC_DEFS", str(header)])
        return set(re.findall(r"\bnvmlReturn_t\s+(nvml[A-Z]\w+)\s*\(", text))
    text = _preprocessed(["-D__CUDA_API_VERSION_INTERNAL", str(header)])
    return set(re.findall(r"\bCUresult\s+(cu[A-Z]\w+)\s*\(", text))


def _preprocessed(arguments: list[str]) -> str:
    return subprocess.run(
        ["gcc", "-E", *arguments], capture_output=True, text=True, check=True
    ).stdout


def fetch(directory: Path) -> Iterator[tuple[Release, set[str], set[str]]]:
    """Yield each release with the functions of its driver and of NVML. Needs pip, gcc and the network."""
    for release in RELEASES:
        folder = directory / release.driver
        requirements = [release.runtime, release.nvml]
        quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        subprocess.run(
            ["python3", "-m", "pip", "download", *quiet, "--dest", str(folder), *requirements],
            check=True,
        )
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith(("/include/cuda.h", "/include/nvml.h")):
                        (folder / Path(member).name).write_bytes(archive.read(member))
        yield release, declared_in(folder / "cuda.h"), declared_in(folder / "nvml.h")


def collect(directory: Path) -> Names:
    """Return each release's new functions. Raises AssertionError if a function was taken away."""
    known: dict[str, set[str]] = {"cuda": set(), "nvml": set()}
    names: Names = {}
    for release, cuda, nvml in fetch(directory):
        here = {"cuda": cuda, "nvml": nvml}
        assert not any(known[part] - here[part] for part in known), release
        names[release.driver] = {part: sorted(here[part] - known[part]) for part in known}
        known = here
    return names


def load() -> Names:
    """Return the committed names."""
    names: Names = json.loads(NAMES.read_text())
    return names


def as_text(names: Names) -> str:
    """Return the names as JSON with one line for each branch and part."""
    branches = (
        f'"{driver}": {{\n"cuda": {json.dumps(new["cuda"])},\n"nvml": {json.dumps(new["nvml"])}}}'
        for driver, new in names.items()
    )
    return "{\n" + ",\n".join(branches) + "\n}\n"


def reason(name: str) -> str:
    """Return why a function is not replaced, or that it is."""
    for reasons in (ALLOWED, NVML_ALLOWED):
        if why := reasons.get(name) or reasons.get(stem(name)):
            return why
    return "replaced" if kind(name) == "replaced" else "reads, waits, copies or frees"


def page(names: Names) -> str:
    """Return the page of the reference."""
    totals = {"cuda": 0, "nvml": 0}
    rows, news = [], []
    for release in RELEASES:
        counts = []
        for part, new in names[release.driver].items():
            totals[part] += len(new)
            kinds = [kind(name) for name in new]
            counts += [totals[part], len(new), kinds.count("replaced")]
            if release is not RELEASES[0]:
                news += [
                    f"| {release.driver} | `{name}` | {kind(name)} | {reason(name)} |"
                    for name in new
                    if matters(name)
                ]
        rows.append(f"| {release.driver} | {release.cuda} | {' | '.join(map(str, counts))} |")
    return "\n".join([_HEAD, *rows, _NEWS, *news, ""])


def matters(name: str) -> bool:
    """Return whether a function's name could be that of one to replace. Streams' variants are left out."""
    if name.endswith(("_ptsz", "_ptds")):
        return False
    return kind(name) != "harmless" or stem(name) in {**ALLOWED, **NVML_ALLOWED}


_HEAD = """\
<!-- Generated by `python -m tests.native.driver_functions`. -->
# Which drivers' functions does fenka know?

All that the headers of drivers 535 to 620 declare: each function is replaced or harmless.

*Replaced* functions are charged, refused or answered by fenka. *Harmless* ones take no memory of the card,
or only use what was charged before. New in a branch are functions that the branch before lacks. Each
version of a function counts (`_v2`, `_ptsz`). The headers come from NVIDIA's packages of the CUDA version
that came with the branch. Functions for graphics and profilers are declared in headers of their own
(cudaGL.h, cudaEGL.h, cudaVDPAU.h, cudaProfiler.h). Only the newest of these are read. Those of their
functions that make contexts are replaced.

| driver | CUDA | libcuda | new | replaced | NVML | new | replaced |
|---|---|---|---|---|---|---|---|"""

_NEWS = """
## New functions that could matter

| driver | function | | why |
|---|---|---|---|"""


def unclassified(names: Names) -> list[str]:
    """Return the functions of which nobody has said what they are."""
    every = (name for new in names.values() for part in new.values() for name in part)
    return [name for name in every if kind(name) == "unknown"]


def main() -> None:
    """Read all headers, and write the names and the page."""
    with tempfile.TemporaryDirectory() as directory:
        names = collect(Path(directory))
    NAMES.write_text(as_text(names))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(names))
    if strange := unclassified(names):
        sys.exit(f"not classified: {', '.join(strange)}")


if __name__ == "__main__":
    main()
