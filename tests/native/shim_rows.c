/* A client with one function for each row of the shim's table (native/shim/hooks.h) that changes the account:
 * a hook that has none does not compile. One command a line: "take NAME BYTES DEVICE", "give NAME HANDLE",
 * "keep NAME HANDLE", "null NAME", "use DEVICE"; one answer a line: the driver's result, and a handle. */
#define _GNU_SOURCE
#include "../../native/shim/newer_driver.h"
#include <elf.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;

CUresult cuNullContext(CUcontext *context, int device); /* of the null driver only */

static CUmemLocation at(int device) {
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
}

/* --- CHARGE: so many bytes of a device -------------------------------------------------------------------- */
#define TAKE(name) static CUresult take_##name(u64 bytes, int device, u64 *out)
#define STREAM ((CUstream)0x100) /* not the default one */

TAKE(cuMemAlloc) { return cuMemAlloc((CUdeviceptr_v1 *)out, (unsigned)bytes); }
TAKE(cuMemAlloc_v2) { return cuMemAlloc_v2((CUdeviceptr *)out, bytes); }
TAKE(cuMemAllocManaged) { return cuMemAllocManaged((CUdeviceptr *)out, bytes, CU_MEM_ATTACH_GLOBAL); }
TAKE(cuMemAllocAsync) { return cuMemAllocAsync((CUdeviceptr *)out, bytes, STREAM); }
TAKE(cuMemAllocAsync_ptsz) { return cuMemAllocAsync_ptsz((CUdeviceptr *)out, bytes, NULL); }

TAKE(cuMemAllocPitch) {
    unsigned pitch;
    return cuMemAllocPitch((CUdeviceptr_v1 *)out, &pitch, 1024, (unsigned)(bytes / 1024), 4);
}

TAKE(cuMemAllocPitch_v2) {
    size_t pitch;
    return cuMemAllocPitch_v2((CUdeviceptr *)out, &pitch, 1024, bytes / 1024, 4);
}

static CUmemoryPool usual(int device) {
    CUmemoryPool pool = NULL;
    cuDeviceGetDefaultMemPool(&pool, device);
    return pool;
}

TAKE(cuMemAllocFromPoolAsync) { return cuMemAllocFromPoolAsync((CUdeviceptr *)out, bytes, usual(device), STREAM); }

TAKE(cuMemAllocFromPoolAsync_ptsz) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = at(device)};
    CUmemoryPool pool;
    CUresult result = cuMemPoolCreate(&pool, &properties);
    return result ? result : cuMemAllocFromPoolAsync_ptsz((CUdeviceptr *)out, bytes, pool, NULL);
}

TAKE(cuMemCreate) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = at(device)};
    return cuMemCreate((CUmemGenericAllocationHandle *)out, bytes, &properties, 0);
}

#define SHAPE .Width = bytes / 1024, .Height = 1024, .NumChannels = 1, .Format = CU_AD_FORMAT_UNSIGNED_INT8
TAKE(cuArrayCreate) { return cuArrayCreate((CUarray *)out, &(CUDA_ARRAY_DESCRIPTOR_v1){SHAPE}); }
TAKE(cuArrayCreate_v2) { return cuArrayCreate_v2((CUarray *)out, &(CUDA_ARRAY_DESCRIPTOR){SHAPE}); }
TAKE(cuArray3DCreate) { return cuArray3DCreate((CUarray *)out, &(CUDA_ARRAY3D_DESCRIPTOR_v1){SHAPE}); }
TAKE(cuArray3DCreate_v2) { return cuArray3DCreate_v2((CUarray *)out, &(CUDA_ARRAY3D_DESCRIPTOR){SHAPE}); }
TAKE(cuMipmappedArrayCreate) {
    return cuMipmappedArrayCreate((CUmipmappedArray *)out, &(CUDA_ARRAY3D_DESCRIPTOR){SHAPE}, 1);
}

/* A cubin with nothing but one variable without a first value: it takes what the section says, not the file. */
static const char names[] = "\0.shstrtab\0.nv.global";
static struct {
    Elf64_Ehdr header;
    Elf64_Shdr sections[3];
    char names[sizeof names];
} cubin;

static const void *cubin_of(u64 bytes) {
    memcpy(cubin.header.e_ident, ELFMAG, SELFMAG);
    cubin.header.e_ident[EI_CLASS] = ELFCLASS64;
    cubin.header.e_machine = 190; /* EM_CUDA */
    cubin.header.e_shoff = offsetof(__typeof__(cubin), sections);
    cubin.header.e_shentsize = sizeof *cubin.sections;
    cubin.header.e_shnum = 3;
    cubin.header.e_shstrndx = 1;
    memcpy(cubin.names, names, sizeof names);
    cubin.sections[1] = (Elf64_Shdr){.sh_name = 1, .sh_type = SHT_STRTAB, .sh_size = sizeof names,
                                     .sh_offset = offsetof(__typeof__(cubin), names)};
    cubin.sections[2] = (Elf64_Shdr){.sh_name = 11, .sh_type = SHT_NOBITS, .sh_size = bytes,
                                     .sh_flags = SHF_ALLOC | SHF_WRITE};
    return &cubin;
}

static const char *file_of(u64 bytes) {
    static char path[64];
    int fd = memfd_create("cubin", 0); /* as long as the process lives: the driver may read it later */
    write(fd, cubin_of(bytes), sizeof cubin);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return path;
}

TAKE(cuModuleLoad) { return cuModuleLoad((CUmodule *)out, file_of(bytes)); }
TAKE(cuModuleLoadData) { return cuModuleLoadData((CUmodule *)out, cubin_of(bytes)); }
TAKE(cuModuleLoadDataEx) { return cuModuleLoadDataEx((CUmodule *)out, cubin_of(bytes), 0, NULL, NULL); }
TAKE(cuModuleLoadFatBinary) { return cuModuleLoadFatBinary((CUmodule *)out, cubin_of(bytes)); }
TAKE(cuLibraryLoadData) {
    return cuLibraryLoadData((CUlibrary *)out, cubin_of(bytes), NULL, NULL, 0, NULL, NULL, 0);
}
TAKE(cuLibraryLoadFromFile) {
    return cuLibraryLoadFromFile((CUlibrary *)out, file_of(bytes), NULL, NULL, 0, NULL, NULL, 0);
}

static CUdeviceptr node_pointer; /* the second number of an answer */

TAKE(cuGraphAddMemAllocNode) {
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS p = {.bytesize = bytes, .poolProps.location = at(device)};
    cuGraphCreate((CUgraph *)out, 0);
    CUresult result = cuGraphAddMemAllocNode(&node, *(CUgraph *)out, NULL, 0, &p);
    node_pointer = p.dptr;
    return result;
}

#define NODE_OF_ALLOCATION {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, \
                            .alloc = {.bytesize = bytes, .poolProps.location = at(device)}}
TAKE(cuGraphAddNode) {
    CUgraphNode node;
    CUgraphNodeParams p = NODE_OF_ALLOCATION;
    cuGraphCreate((CUgraph *)out, 0);
    return cuGraphAddNode(&node, *(CUgraph *)out, NULL, 0, &p);
}

TAKE(cuGraphAddNode_v2) {
    CUgraphNode node;
    CUgraphNodeParams p = NODE_OF_ALLOCATION;
    cuGraphCreate((CUgraph *)out, 0);
    return cuGraphAddNode_v2(&node, *(CUgraph *)out, NULL, NULL, 0, &p);
}

TAKE(cuGraphAddNode_v3) {
    CUgraphNode node;
    CUgraphNodeParams p = NODE_OF_ALLOCATION;
    cuGraphCreate((CUgraph *)out, 0);
    return cuGraphAddNode_v3(&node, *(CUgraph *)out, NULL, NULL, 0, &p);
}

TAKE(cuCtxCreate) { return cuCtxCreate((CUcontext *)out, 0, device); }
TAKE(cuCtxCreate_v2) { return cuCtxCreate_v2((CUcontext *)out, 0, device); }
TAKE(cuCtxCreate_v3) { return cuCtxCreate_v3((CUcontext *)out, NULL, 0, 0, device); }
TAKE(cuCtxCreate_v4) { return cuCtxCreate_v4((CUcontext *)out, NULL, 0, device); }
TAKE(cuGLCtxCreate) { return cuGLCtxCreate((CUcontext *)out, 0, device); }
TAKE(cuGLCtxCreate_v2) { return cuGLCtxCreate_v2((CUcontext *)out, 0, device); }
TAKE(cuVDPAUCtxCreate) { return cuVDPAUCtxCreate((CUcontext *)out, 0, device, 0, NULL); }
TAKE(cuVDPAUCtxCreate_v2) { return cuVDPAUCtxCreate_v2((CUcontext *)out, 0, device, 0, NULL); }
TAKE(cuGreenCtxCreate) { return cuGreenCtxCreate((CUgreenCtx *)out, NULL, device, CU_GREEN_CTX_DEFAULT_STREAM); }
TAKE(cuCtxSetLimit) {
    cuCtxGetCurrent((CUcontext *)out);
    return cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, bytes);
}

TAKE(cuDevicePrimaryCtxRetain) {
    CUcontext context;
    *out = (u64)device;
    return cuDevicePrimaryCtxRetain(&context, device);
}

/* --- DISCHARGE: what was taken ------------------------------------------------------------------------------- */
#define GIVE(name, type, ...) \
    static CUresult give_##name(u64 handle) { return name((type)handle, ##__VA_ARGS__); }
GIVE(cuMemFree, CUdeviceptr_v1)
GIVE(cuMemFree_v2, CUdeviceptr)
GIVE(cuMemFreeAsync, CUdeviceptr, STREAM)
GIVE(cuMemFreeAsync_ptsz, CUdeviceptr, NULL)
GIVE(cuMemRelease, CUmemGenericAllocationHandle)
GIVE(cuMemUnmap, CUdeviceptr, 1 << 20)
GIVE(cuArrayDestroy, CUarray)
GIVE(cuMipmappedArrayDestroy, CUmipmappedArray)
GIVE(cuModuleUnload, CUmodule)
GIVE(cuLibraryUnload, CUlibrary)
GIVE(cuGraphDestroy, CUgraph)
GIVE(cuGraphExecDestroy, CUgraphExec)
GIVE(cuCtxDestroy, CUcontext)
GIVE(cuCtxDestroy_v2, CUcontext)
GIVE(cuCtxDetach, CUcontext)
GIVE(cuGreenCtxDestroy, CUgreenCtx)
GIVE(cuDevicePrimaryCtxRelease, CUdevice)
GIVE(cuDevicePrimaryCtxRelease_v2, CUdevice)
GIVE(cuDevicePrimaryCtxReset, CUdevice)
GIVE(cuDevicePrimaryCtxReset_v2, CUdevice)

/* --- RETAIN: a second claim on what was taken ------------------------------------------------------------- */
#define KEEP(name) static CUresult keep_##name(u64 handle, u64 *out)
KEEP(cuMemMap) { return cuMemMap(*out = 0x700000000000, 1 << 20, 0, handle, 0); }
KEEP(cuMemRetainAllocationHandle) { return cuMemRetainAllocationHandle((CUmemGenericAllocationHandle *)out, (void *)handle); }
KEEP(cuMemImportFromShareableHandle) {
    return cuMemImportFromShareableHandle((CUmemGenericAllocationHandle *)out, (void *)handle,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}
#define TILE(handle) &(CUarrayMapInfo){.memOperationType = CU_MEM_OPERATION_TYPE_MAP, .memHandle.memHandle = handle}
KEEP(cuMemMapArrayAsync) { return cuMemMapArrayAsync(TILE(*out = handle), 1, NULL); }
KEEP(cuMemMapArrayAsync_ptsz) { return cuMemMapArrayAsync_ptsz(TILE(*out = handle), 1, NULL); }
KEEP(cuCtxAttach) { return cuCtxAttach((CUcontext *)out, 0); }
KEEP(cuGraphInstantiate) { return cuGraphInstantiate((CUgraphExec *)out, (CUgraph)handle, NULL, NULL, 0); }
KEEP(cuGraphInstantiate_v2) { return cuGraphInstantiate_v2((CUgraphExec *)out, (CUgraph)handle, NULL, NULL, 0); }
KEEP(cuGraphInstantiateWithFlags) { return cuGraphInstantiateWithFlags((CUgraphExec *)out, (CUgraph)handle, 0); }
static CUDA_GRAPH_INSTANTIATE_PARAMS how;
KEEP(cuGraphInstantiateWithParams) { return cuGraphInstantiateWithParams((CUgraphExec *)out, (CUgraph)handle, &how); }
KEEP(cuGraphInstantiateWithParams_ptsz) {
    return cuGraphInstantiateWithParams_ptsz((CUgraphExec *)out, (CUgraph)handle, &how);
}

/* --- LAUNCH: gives the current device work --------------------------------------------------------------- */
#define SPEND(name, ...) static CUresult spend_##name(void) { return name(__VA_ARGS__); }
#define FUNCTION (CUfunction)0x2000
#define SHAPE_OF_LAUNCH 4, 1, 1, 64, 1, 1, 0
SPEND(cuLaunch, FUNCTION)
SPEND(cuLaunchGrid, FUNCTION, 4, 1)
SPEND(cuLaunchGridAsync, FUNCTION, 4, 1, STREAM)
SPEND(cuLaunchKernel, FUNCTION, SHAPE_OF_LAUNCH, STREAM, NULL, NULL)
SPEND(cuLaunchKernel_ptsz, FUNCTION, SHAPE_OF_LAUNCH, NULL, NULL, NULL)
static const CUlaunchConfig config = {.gridDimX = 4, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 64, .hStream = STREAM};
SPEND(cuLaunchKernelEx, &config, FUNCTION, NULL, NULL)
SPEND(cuLaunchKernelEx_ptsz, &config, FUNCTION, NULL, NULL)
SPEND(cuLaunchCooperativeKernel, FUNCTION, SHAPE_OF_LAUNCH, STREAM, NULL)
SPEND(cuLaunchCooperativeKernel_ptsz, FUNCTION, SHAPE_OF_LAUNCH, NULL, NULL)
static CUDA_LAUNCH_PARAMS parameters = {FUNCTION, SHAPE_OF_LAUNCH, STREAM, NULL};
SPEND(cuLaunchCooperativeKernelMultiDevice, &parameters, 1, 0)
SPEND(cuGraphLaunch, (CUgraphExec)0x3000, STREAM)
SPEND(cuGraphLaunch_ptsz, (CUgraphExec)0x3000, NULL)

/* So often; `out` = the milliseconds that it took. */
static CUresult spend(CUresult (*once)(void), u64 times, u64 *out) {
    struct timespec begin, end;
    CUresult result = CUDA_SUCCESS;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (u64 i = 0; i < times && !result; i++)
        result = once();
    clock_gettime(CLOCK_MONOTONIC, &end);
    *out = (u64)((end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000);
    return result;
}

/* --- the table ------------------------------------------------------------------------------------------- */
#define ROW_CHARGE(name) {#name, (void *)name, take_##name, NULL, NULL, NULL},
#define ROW_DISCHARGE(name) {#name, (void *)name, NULL, give_##name, NULL, NULL},
#define ROW_RETAIN(name) {#name, (void *)name, NULL, NULL, keep_##name, NULL},
#define ROW_LAUNCH(name) {#name, (void *)name, NULL, NULL, NULL, spend_##name},
#define ROW_TRACK(name) {#name, (void *)name, NULL, NULL, NULL, NULL},
#define ROW_REPORT(name) ROW_TRACK(name)
#define ROW_RESOLVE(name) ROW_TRACK(name)

static const struct row {
    const char *name;
    void *function;
    CUresult (*take)(u64, int, u64 *);
    CUresult (*give)(u64);
    CUresult (*keep)(u64, u64 *);
    CUresult (*spend)(void);
} rows[] = {
#define CUDA_HOOK(role, name, base, since, per_thread) ROW_##role(name)
#include "../../native/shim/hooks.h"
};

static const struct row *row(const char *name) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strcmp(rows[i].name, name))
            return &rows[i];
    return NULL;
}

static CUcontext contexts[16];

static CUresult use(int device) {
    CUresult result = contexts[device] ? CUDA_SUCCESS : cuCtxCreate_v2(&contexts[device], 0, device);
    return result ? result : cuCtxSetCurrent(contexts[device]);
}

/* A context of the driver that the shim has not seen made. */
static CUresult current(int device) {
    CUcontext context;
    CUresult result = cuNullContext(&context, device);
    return result ? result : cuCtxSetCurrent(context);
}

/* Nothing for every argument: no hook has more than eight, and none takes a structure by value. */
static CUresult with_nothing(void *function) {
    typedef CUresult (*any)(long, long, long, long, long, long, long, long);
    return ((any)function)(0, 0, 0, 0, 0, 0, 0, 0);
}

static CUresult answer(const char *what, const char *name, u64 a, int b, u64 *out) {
    const struct row *r = row(name);
    if (!strcmp(what, "init"))
        return cuInit(0);
    if (!strcmp(what, "use"))
        return use((int)a);
    if (!strcmp(what, "current"))
        return current((int)a);
    if (!strcmp(what, "capture"))
        return cuStreamBeginCaptureToGraph(STREAM, (CUgraph)a, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
    if (!strcmp(what, "captured"))
        return cuStreamEndCapture(STREAM, (CUgraph *)out);
    if (!strcmp(what, "printf"))
        return cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, a);
    if (!strcmp(what, "graph"))
        return cuGraphCreate((CUgraph *)out, 0);
    if (!strcmp(what, "launch"))
        return b ? cuGraphLaunch_ptsz((CUgraphExec)a, NULL) : cuGraphLaunch((CUgraphExec)a, STREAM);
    if (!strcmp(what, "free-node")) {
        CUgraphNode node;
        CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .free.dptr = node_pointer};
        CUgraph graph = (CUgraph)a;
        return b == 0   ? cuGraphAddMemFreeNode(&node, graph, NULL, 0, node_pointer)
               : b == 1 ? cuGraphAddNode(&node, graph, NULL, 0, &p)
               : b == 2 ? cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &p)
                        : cuGraphAddNode_v3(&node, graph, NULL, NULL, 0, &p);
    }
    /* The number is a kind of location; the pool is the one made or asked for last. */
    static CUmemoryPool pool;
    CUmemLocation location = {.type = (CUmemLocationType)b, .id = 1};
    if (!strcmp(what, "usual-pool"))
        return strcmp(name, "cuMemGetMemPool") ? cuMemGetDefaultMemPool(&pool, &location, (CUmemAllocationType)a)
                                               : cuMemGetMemPool(&pool, &location, (CUmemAllocationType)a);
    if (!strcmp(what, "new-pool"))
        return cuMemPoolCreate(&pool, &(CUmemPoolProps){.allocType = (CUmemAllocationType)a, .location = location});
    if (!strcmp(what, "from-last-pool"))
        return cuMemAllocFromPoolAsync((CUdeviceptr *)out, a, pool, STREAM);
    if (!strcmp(what, "block"))
        return cuMemCreate((CUmemGenericAllocationHandle *)out, a,
                           &(CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location}, 0);
    if (!strcmp(what, "ipc")) {
        CUipcMemHandle handle = {{0}};
        memcpy(handle.reserved, &a, sizeof a);
        return cuIpcOpenMemHandle_v2((CUdeviceptr *)out, handle, 0);
    }
    if (!strcmp(what, "ipc-close"))
        return cuIpcCloseMemHandle(a);
    if (!strcmp(what, "export"))
        return cuMemExportToShareableHandle(out, a, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (!strcmp(what, "close"))
        return close((int)a) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    if (!strcmp(what, "map"))
        return cuMemMap((CUdeviceptr)b << 20, 1 << 20, 0, a, 0);
    if (!strcmp(what, "pool")) {
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = at((int)a)};
        return cuMemPoolCreate((CUmemoryPool *)out, &properties);
    }
    if (!strcmp(what, "from-pool"))
        return cuMemAllocFromPoolAsync((CUdeviceptr *)out, (size_t)b, (CUmemoryPool)a, NULL);
    if (!strcmp(what, "pool-set"))
        return cuMemPoolSetAttribute((CUmemoryPool)a, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &a);
    if (!strcmp(what, "pool-trim"))
        return cuMemPoolTrimTo((CUmemoryPool)a, 0);
    if (!strcmp(what, "pool-destroy"))
        return cuMemPoolDestroy((CUmemoryPool)a);
    if (!r)
        return CUDA_ERROR_UNKNOWN;
    if (!strcmp(what, "take"))
        return r->take(a, b, out);
    if (!strcmp(what, "give"))
        return r->give(a);
    if (!strcmp(what, "keep"))
        return r->keep(a, out);
    if (!strcmp(what, "spend"))
        return spend(r->spend, a, out);
    return !strcmp(what, "null") ? with_nothing(r->function) : CUDA_ERROR_UNKNOWN;
}

int main(void) {
    char line[160], what[32], name[64];
    while (fgets(line, sizeof line, stdin)) {
        u64 a = 0, out = 0;
        int b = 0;
        sscanf(line, "%31s %63s %llu %d", what, name, &a, &b);
        CUresult result = answer(what, name, a, b, &out);
        printf("%d %llu %llu\n", (int)result, out, (u64)node_pointer);
        fflush(stdout);
    }
    return 0;
}
