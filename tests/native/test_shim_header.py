"""No function of the installed CUDA headers that takes or maps device memory is unknown to the shim.

Every function that cuda.h declares is replaced, or is on a list here that says why it need not be. A newer
header with a function that is on neither fails, and so does a newer version of one that is replaced.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.native.clients import _include
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
    "cuDevSmResourceSplitByCount": NO_MEMORY,
    "cuDeviceGetDefaultMemPool": NO_MEMORY,
    "cuDeviceGetMemPool": NO_MEMORY,
    "cuDeviceRegisterAsyncNotification": NO_MEMORY,
    "cuDeviceSetGraphMemAttribute": NO_MEMORY,
    "cuDeviceSetMemPool": "a pool is asked for its card when it is used",
    "cuEventCreate": NO_MEMORY,
    "cuExternalMemoryGetMappedBuffer": ANOTHER,
    "cuExternalMemoryGetMappedMipmappedArray": ANOTHER,
    "cuFuncIsLoaded": NO_MEMORY,
    "cuFuncLoad": CODE,
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
    "cuGraphicsMapResources": ANOTHER,
    "cuGraphicsResourceGetMappedMipmappedArray": ANOTHER,
    "cuGraphicsResourceGetMappedPointer": ANOTHER,
    "cuGraphicsResourceSetMapFlags": ANOTHER,
    "cuGraphicsSubResourceGetMappedArray": ANOTHER,
    "cuGraphicsUnmapResources": ANOTHER,
    "cuGreenCtxStreamCreate": NO_MEMORY,
    "cuImportExternalMemory": ANOTHER,
    "cuImportExternalSemaphore": NO_MEMORY,
    "cuIpcOpenEventHandle": NO_MEMORY,
    "cuLaunchHostFunc": "work of the host, not of the card",
    "cuLinkAddData": HOST,
    "cuLinkAddFile": HOST,
    "cuLinkComplete": HOST,
    "cuLinkCreate": HOST,
    "cuMemAddressFree": ADDRESSES,
    "cuMemAddressReserve": ADDRESSES,
    "cuMemAdvise": MANAGED,
    "cuMemAllocHost": HOST,
    "cuMemBatchDecompressAsync": ORDERED,
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
    "cuMemSetAccess": ADDRESSES,
    "cuMipmappedArrayGetLevel": NO_MEMORY,
    "cuMipmappedArrayGetMemoryRequirements": NO_MEMORY,
    "cuMipmappedArrayGetSparseProperties": NO_MEMORY,
    "cuModuleGetLoadingMode": NO_MEMORY,
    "cuMulticastAddDevice": NO_MEMORY,
    "cuMulticastBindAddr": ADDRESSES,
    "cuMulticastBindMem": ADDRESSES,
    "cuMulticastCreate": ADDRESSES,
    "cuMulticastUnbind": ADDRESSES,
    "cuStreamAddCallback": NO_MEMORY,
    "cuStreamAttachMemAsync": MANAGED,
    "cuStreamBeginCapture": NO_MEMORY,
    "cuStreamBeginCaptureToGraph": NO_MEMORY,
    "cuStreamCreate": NO_MEMORY,
    "cuStreamCreateWithPriority": NO_MEMORY,
    "cuSurfObjectCreate": NO_MEMORY,
    "cuSurfRefGetArray": NO_MEMORY,
    "cuSurfRefSetArray": NO_MEMORY,
    "cuTensorMapEncodeIm2col": HOST,
    "cuTensorMapEncodeIm2colWide": HOST,
    "cuTensorMapEncodeTiled": HOST,
    "cuTensorMapReplaceAddress": HOST,
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
        ["gcc", "-E", "-D__CUDA_API_VERSION_INTERNAL", _include("cuda_runtime"), "-"],
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


@pytest.fixture(scope="module")
def names() -> set[str]:
    """What the installed header declares."""
    return declared("#include <cuda.h>\n")


def test_every_function_of_the_header_is_classified(names: set[str]) -> None:
    """All 600 of them; what is replaced is really declared, so that no hook is misspelt."""
    assert len(names) > 600
    assert not unknown(names)
    assert not set(HOOKS) - names


def test_every_exception_exists_in_the_header(names: set[str]) -> None:
    """The list does not outlive the header, and excuses nothing that is replaced."""
    stems = {stem(name) for name in names}
    assert not set(ALLOWED) - stems
    assert not set(ALLOWED) & {stem(name) for name in HOOKS}


@pytest.mark.parametrize(
    "new",
    [
        "cuMemAllocCompressed",
        "cuMemCreate_v2",
        "cuMemAllocAsync_v2_ptsz",
        "cuArray4DCreate",
        "cuMemPoolReserve",
        "cuHeapGrow",
        "cuMemcpyAndAllocAsync_ptds",
        "cuFrobnicate",
        "cuLaunchKernel_v2",
        "cuGraphLaunch_v2_ptsz",
        "cuStreamSetLaunch",
    ],
)
def test_check_fails_when_the_header_has_a_new_function(new: str) -> None:
    """One that a later header adds is not let pass because its name resembles a harmless one."""
    text = f"typedef int CUresult;\nCUresult {new}(void *out, unsigned long bytes);\n"
    assert declared(text) == {new}
    assert unknown({new}) == {new}


def test_shim_exports_what_the_table_lists() -> None:
    """Every row is a symbol of the library that is preloaded."""
    shim = Path(__file__).parent.parent.parent / "src" / "fenka" / "_native" / "libfenka.so"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(shim)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[2] for line in listed.splitlines()}
    assert set(HOOKS) <= exported
