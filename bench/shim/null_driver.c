/* A libcuda.so.1 whose calls do nothing, so that what remains of a measurement is the shim.
 *
 * FENKA_NULL_CARDS holds the UUIDs of its cards, comma-separated; it heeds CUDA_VISIBLE_DEVICES when that holds
 * UUIDs. Link it with -Bsymbolic, as a driver is: its own calls must not come back through the shim. Allocation
 * moves a counter; nothing is refused, so that every refusal seen is the shim's, unless FENKA_NULL_FAIL is set:
 * then every call that takes memory answers CUDA_ERROR_NOT_SUPPORTED. Missing arguments are refused as by the
 * real one. */
#define _GNU_SOURCE
#include "../../native/shim/newer_driver.h"
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_CARDS 16
#define CARD_BYTES (16ull << 30)

static char uuids[MAX_CARDS][41];
static int count;
static CUdeviceptr next_pointer = 0x7f0000000000;
static __thread CUcontext current;
static bool failing;
static CUgraph captured; /* what every stream but the default one is captured into */
static int active[MAX_CARDS];

/* A context's address tells its card. */
static char contexts[MAX_CARDS][64];

static CUdevice card_of(CUcontext context) {
    return (CUdevice)(((char *)context - contexts[0]) / (long)sizeof contexts[0]);
}

/* Where a call takes memory: nothing, or why not. */
#define NEED(argument)                            \
    do {                                          \
        if (!(argument))                          \
            return CUDA_ERROR_INVALID_VALUE;      \
        if (failing)                              \
            return CUDA_ERROR_NOT_SUPPORTED;      \
    } while (0)

static CUdeviceptr take(size_t bytes) {
    return __atomic_fetch_add(&next_pointer, (bytes + 511) & ~511ull, __ATOMIC_RELAXED);
}

/* What all processes hold by the driver's own count, in units of 64 KiB, and the most that it ever was:
 * shared by FENKA_NULL_LEDGER, a file of 16 bytes. Kept for plain allocations only; the pointer tells the size. */
static struct ledger {
    uint64_t held, most;
} *ledger;

static void open_ledger(void) {
    const char *path = getenv("FENKA_NULL_LEDGER");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd >= 0)
        ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

static CUdeviceptr enter(size_t bytes) {
    uint64_t units = bytes >> 16, held = __atomic_add_fetch(&ledger->held, units, __ATOMIC_SEQ_CST);
    uint64_t most = __atomic_load_n(&ledger->most, __ATOMIC_RELAXED);
    while (held > most &&
           !__atomic_compare_exchange_n(&ledger->most, &most, held, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
    return (take(512) >> 9) << 20 | units;
}

CUresult cuInit(unsigned int flags) {
    const char *all = getenv("FENKA_NULL_CARDS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[4096];
    (void)flags;
    if (count) /* as in a real driver, the first success decides */
        return CUDA_SUCCESS;
    open_ledger();
    failing = getenv("FENKA_NULL_FAIL") != NULL;
    count = 0;
    snprintf(list, sizeof list, "%s", visible ? visible : all ? all : "");
    for (char *uuid = strtok(list, ","); uuid && count < MAX_CARDS; uuid = strtok(NULL, ",")) {
        if (!all || !strstr(all, uuid))
            break;
        snprintf(uuids[count++], sizeof uuids[0], "%s", uuid);
    }
    return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 12090;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *out) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return ordinal >= 0 && ordinal < count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (device < 0 || device >= count)
        return CUDA_ERROR_INVALID_DEVICE;
    const char *at = uuids[device] + 4;
    for (int i = 0; i < 16; i++, at += 2) {
        unsigned int byte = 0;
        at += *at == '-';
        sscanf(at, "%2x", &byte);
        uuid->bytes[i] = (char)byte;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    (void)device;
    *bytes = CARD_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (free)
        *free = CARD_BYTES;
    if (total)
        *total = CARD_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    NEED(context && device >= 0 && device < count);
    (void)flags;
    *context = current = (CUcontext)(contexts[device] + 32);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    if (current == context)
        current = NULL;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NEED(context);
    active[device]++;
    *context = (CUcontext)contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    active[device]--;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    active[device] = 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *out) {
    *flags = 0;
    *out = active[device] > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = card_of(current);
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    NEED(pointer && bytes);
    *pointer = ledger ? enter(bytes) : take(bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    (void)flags;
    return cuMemAlloc_v2(pointer, bytes);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    NEED(pointer && pitch);
    (void)element;
    *pitch = (width + 1023) & ~(size_t)1023; /* wider than the shim assumes */
    return cuMemAlloc_v2(pointer, *pitch * height);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    if (ledger)
        __atomic_fetch_sub(&ledger->held, pointer & 0xfffff, __ATOMIC_SEQ_CST);
    return pointer == 0xbad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    (void)stream;
    return cuMemAlloc_v2(pointer, bytes);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    (void)stream;
    return cuMemAlloc_v2(pointer, bytes);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    (void)stream;
    return cuMemFree_v2(pointer);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    (void)stream;
    return cuMemFree_v2(pointer);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    NEED(pool && properties);
    (void)properties;
    *pool = (CUmemoryPool)take(512);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    (void)pool;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)pool;
    (void)stream;
    return cuMemAlloc_v2(pointer, bytes);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    NEED(handle && properties);
    (void)properties;
    (void)flags;
    return cuMemAlloc_v2(handle, bytes);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    (void)handle;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    (void)address, (void)bytes, (void)offset, (void)handle, (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    (void)address, (void)bytes;
    return CUDA_SUCCESS;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    NEED(array && d);
    (void)d;
    *array = (CUarray)take(512);
    return CUDA_SUCCESS;
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    NEED(array && d);
    (void)d;
    *array = (CUarray)take(512);
    return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray array) {
    (void)array;
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    NEED(array && d);
    (void)d, (void)levels;
    *array = (CUmipmappedArray)take(512);
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    (void)array;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t n,
                                CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    NEED(node && p);
    (void)graph, (void)dependencies, (void)n;
    *node = (CUgraphNode)take(512);
    return cuMemAlloc_v2(&p->dptr, p->bytesize);
}

#include "null_more.h"

#include "null_launch.h"

#define ENTRY(name) {#name, (void *)name}
static const struct {
    const char *name;
    void *address;
} entries[] = {
    ENTRY(cuInit),
    ENTRY(cuDriverGetVersion),
    ENTRY(cuDeviceGetCount),
    ENTRY(cuDeviceGet),
    ENTRY(cuDeviceGetUuid_v2),
    ENTRY(cuDeviceTotalMem_v2),
    ENTRY(cuMemGetInfo_v2),
    ENTRY(cuCtxCreate_v2),
    ENTRY(cuCtxDestroy_v2),
    ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuDevicePrimaryCtxRelease_v2),
    ENTRY(cuDevicePrimaryCtxReset_v2),
    ENTRY(cuDevicePrimaryCtxGetState),
    ENTRY(cuCtxSetCurrent),
    ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxGetDevice),
    ENTRY(cuMemAlloc_v2),
    ENTRY(cuMemAllocManaged),
    ENTRY(cuMemAllocPitch_v2),
    ENTRY(cuMemFree_v2),
    ENTRY(cuMemAllocAsync),
    ENTRY(cuMemAllocAsync_ptsz),
    ENTRY(cuMemFreeAsync),
    ENTRY(cuMemFreeAsync_ptsz),
    ENTRY(cuMemPoolCreate),
    ENTRY(cuMemPoolDestroy),
    ENTRY(cuMemAllocFromPoolAsync),
    ENTRY(cuMemCreate),
    ENTRY(cuMemRelease),
    ENTRY(cuMemMap),
    ENTRY(cuMemUnmap),
    ENTRY(cuArrayCreate_v2),
    ENTRY(cuArray3DCreate_v2),
    ENTRY(cuArrayDestroy),
    ENTRY(cuMipmappedArrayCreate),
    ENTRY(cuMipmappedArrayDestroy),
    ENTRY(cuGraphAddMemAllocNode),
    ENTRY(cuDeviceTotalMem),
    ENTRY(cuMemGetInfo),
    ENTRY(cuMemAlloc),
    ENTRY(cuMemAllocPitch),
    ENTRY(cuMemFree),
    ENTRY(cuMemAllocFromPoolAsync_ptsz),
    ENTRY(cuMemPoolSetAttribute),
    ENTRY(cuMemPoolTrimTo),
    ENTRY(cuDeviceGetDefaultMemPool),
    ENTRY(cuDeviceGetMemPool),
    ENTRY(cuMemRetainAllocationHandle),
    ENTRY(cuMemImportFromShareableHandle),
    ENTRY(cuMemExportToShareableHandle),
    ENTRY(cuMemGetAllocationPropertiesFromHandle),
    ENTRY(cuMemMapArrayAsync),
    ENTRY(cuMemMapArrayAsync_ptsz),
    ENTRY(cuIpcOpenMemHandle_v2),
    ENTRY(cuIpcOpenMemHandle),
    ENTRY(cuIpcGetMemHandle),
    ENTRY(cuStreamSynchronize),
    ENTRY(cuStreamSynchronize_ptsz),
    ENTRY(cuCtxSynchronize),
    ENTRY(cuCtxSynchronize_v2),
    ENTRY(cuEventSynchronize),
    ENTRY(cuDeviceGraphMemTrim),
    ENTRY(cuStreamEndCapture_ptsz),
    ENTRY(cuIpcCloseMemHandle),
    ENTRY(cuArrayCreate),
    ENTRY(cuArray3DCreate),
    ENTRY(cuGraphCreate),
    ENTRY(cuGraphAddNode),
    ENTRY(cuGraphAddNode_v2),
    ENTRY(cuGraphAddNode_v3),
    ENTRY(cuGraphInstantiateWithFlags),
    ENTRY(cuGraphInstantiate),
    ENTRY(cuGraphInstantiate_v2),
    ENTRY(cuGraphInstantiateWithParams),
    ENTRY(cuGraphInstantiateWithParams_ptsz),
    ENTRY(cuGraphAddMemFreeNode),
    ENTRY(cuGraphLaunch),
    ENTRY(cuGraphLaunch_ptsz),
    ENTRY(cuGraphDestroy),
    ENTRY(cuGraphExecDestroy),
    ENTRY(cuStreamBeginCaptureToGraph),
    ENTRY(cuStreamEndCapture),
    ENTRY(cuStreamGetCaptureInfo_v2),
    ENTRY(cuStreamGetCaptureInfo_v2_ptsz),
    ENTRY(cuStreamGetCtx),
    ENTRY(cuCtxPushCurrent_v2),
    ENTRY(cuCtxPopCurrent_v2),
    ENTRY(cuCtxCreate),
    ENTRY(cuCtxCreate_v3),
    ENTRY(cuCtxCreate_v4),
    ENTRY(cuGLCtxCreate),
    ENTRY(cuGLCtxCreate_v2),
    ENTRY(cuVDPAUCtxCreate),
    ENTRY(cuVDPAUCtxCreate_v2),
    ENTRY(cuCtxDestroy),
    ENTRY(cuCtxAttach),
    ENTRY(cuCtxDetach),
    ENTRY(cuCtxSetLimit),
    ENTRY(cuGreenCtxCreate),
    ENTRY(cuGreenCtxDestroy),
    ENTRY(cuDevicePrimaryCtxRelease),
    ENTRY(cuDevicePrimaryCtxReset),
    ENTRY(cuModuleLoad),
    ENTRY(cuModuleLoadData),
    ENTRY(cuModuleLoadDataEx),
    ENTRY(cuModuleLoadFatBinary),
    ENTRY(cuModuleUnload),
    ENTRY(cuModuleGetLoadingMode),
    ENTRY(cuLibraryLoadData),
    ENTRY(cuLibraryLoadFromFile),
    ENTRY(cuLibraryUnload),
    ENTRY(cuLaunch),
    ENTRY(cuLaunchGrid),
    ENTRY(cuLaunchGridAsync),
    ENTRY(cuLaunchKernel),
    ENTRY(cuLaunchKernel_ptsz),
    ENTRY(cuLaunchKernelEx),
    ENTRY(cuLaunchKernelEx_ptsz),
    ENTRY(cuLaunchCooperativeKernel),
    ENTRY(cuLaunchCooperativeKernel_ptsz),
    ENTRY(cuLaunchCooperativeKernelMultiDevice),
    ENTRY(cuThreadExchangeStreamCaptureMode),
    ENTRY(cuStreamIsCapturing),
    ENTRY(cuEventCreate),
    ENTRY(cuEventDestroy_v2),
    ENTRY(cuEventRecord),
    ENTRY(cuEventQuery),
    ENTRY(cuEventElapsedTime),
    ENTRY(cuGetProcAddress),
    ENTRY(cuGetProcAddress_v2),
};

static void *entry(const char *name) {
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(entries[i].name, name))
            return entries[i].address;
    return NULL;
}

/* As the real one: a base name gives the newest version that the caller knows, per-thread streams by a flag.
 * With FENKA_NULL_INTERNAL the answer for cuMemAlloc is an address that no symbol has. */
static CUresult internal_alloc(CUdeviceptr *pointer, size_t bytes) {
    return cuMemAlloc_v2(pointer, bytes);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    if (!symbol || !function)
        return CUDA_ERROR_INVALID_VALUE;
    static const char *const per_thread[] = {"", "_ptsz"};
    char name[128];
    *function = NULL;
    if (!strcmp(symbol, "cuMemAlloc") && getenv("FENKA_NULL_INTERNAL"))
        *function = (void *)internal_alloc;
    for (int suffix = flags & 2 ? 1 : 0; suffix >= 0 && !*function; suffix--)
        for (int v = version < 3020 ? 1 : 2; v >= 1 && !*function; v--) {
            snprintf(name, sizeof name, "%s%s%s", symbol, v == 2 ? "_v2" : "", per_thread[suffix]);
            if (!strcmp(name, "cuGetProcAddress_v2") && version < 12000)
                continue;
            *function = entry(name);
        }
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
