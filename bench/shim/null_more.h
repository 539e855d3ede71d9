/* The rest of null_driver.c: older and newer names of the same, and what it merely says yes to. */
CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t wide = 0;
    CUresult result = bytes ? cuDeviceTotalMem_v2(&wide, device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *bytes = wide > UINT32_MAX ? UINT32_MAX : (unsigned int)wide;
    return result;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    if (free)
        *free = UINT32_MAX;
    if (total)
        *total = UINT32_MAX;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    NEED(pointer && bytes);
    *pointer = (CUdeviceptr_v1)take(bytes); /* as narrow as it was in 2007, and as unique as a test needs */
    return CUDA_SUCCESS;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element) {
    NEED(pointer && pitch);
    (void)element;
    *pitch = (width + 1023) & ~1023u;
    return cuMemAlloc(pointer, *pitch * height);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    return cuMemFree_v2(pointer);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    (void)pool, (void)attribute;
    return value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    (void)pool, (void)keep;
    return CUDA_SUCCESS;
}

static CUmemoryPool pools[MAX_CARDS + 1];

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    if (!pool || device < 0 || device >= count)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = (CUmemoryPool)(pools + device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    return cuDeviceGetDefaultMemPool(pool, device);
}

/* The last one is the host's. */
CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    (void)type;
    if (!pool || !location)
        return CUDA_ERROR_INVALID_VALUE;
    bool device = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
    *pool = (CUmemoryPool)(pools + (device ? location->id : MAX_CARDS));
    return CUDA_SUCCESS;
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return cuMemGetDefaultMemPool(pool, location, type);
}

/* An address is its block's handle, so that a test can name the block that it means. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = (CUmemGenericAllocationHandle)address;
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    (void)type;
    return cuMemRetainAllocationHandle(handle, shareable);
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    (void)type, (void)flags;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)shareable = (int)syscall(SYS_memfd_create, "null-memory", 1u /* CLOEXEC; older libc lacks the call */);
    return CUDA_SUCCESS;
}

/* All lie on the current context's device. */
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
    (void)handle;
    *out = (CUmemAllocationProp){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = card_of(current)}};
    return CUDA_SUCCESS;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int n, CUstream stream) {
    (void)n, (void)stream;
    return list ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int n, CUstream stream) {
    return cuMemMapArrayAsync(list, n, stream);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    (void)flags;
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(pointer, handle.reserved, sizeof *pointer); /* again so that a test can name what it means */
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    return cuIpcOpenMemHandle_v2(pointer, handle, flags);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(handle->reserved, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    return cuStreamSynchronize(stream);
}

CUresult cuCtxSynchronize(void) {
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent event) {
    (void)event;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    (void)device;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    (void)pointer;
    return CUDA_SUCCESS;
}

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
    NEED(array && d);
    *array = (CUarray)take(512);
    return CUDA_SUCCESS;
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
    NEED(array && d);
    *array = (CUarray)take(512);
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) {
    (void)flags;
    *graph = (CUgraph)take(512);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t n,
                        CUgraphNodeParams *p) {
    NEED(node && p);
    (void)graph, (void)dependencies, (void)n;
    *node = (CUgraphNode)take(512);
    return p->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ? cuMemAlloc_v2(&p->alloc.dptr, p->alloc.bytesize) : CUDA_SUCCESS;
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t n, CUgraphNodeParams *p) {
    (void)edges;
    return cuGraphAddNode(node, graph, dependencies, n, p);
}

CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t n, CUgraphNodeParams *p) {
    return cuGraphAddNode_v2(node, graph, dependencies, edges, n, p);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)graph, (void)flags;
    if (!exec)
        return CUDA_ERROR_INVALID_VALUE;
    *exec = (CUgraphExec)take(512);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    (void)error, (void)log, (void)room;
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    return cuGraphInstantiate(exec, graph, error, log, room);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return p ? cuGraphInstantiateWithFlags(exec, graph, 0) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return cuGraphInstantiateWithParams(exec, graph, p);
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t n,
                               CUdeviceptr pointer) {
    NEED(node);
    (void)graph, (void)dependencies, (void)n, (void)pointer;
    *node = (CUgraphNode)take(512);
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    (void)stream;
    return exec ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    return cuGraphLaunch(exec, stream);
}

CUresult cuGraphDestroy(CUgraph graph) {
    return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    return exec ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t n, CUstreamCaptureMode mode) {
    (void)stream, (void)dependencies, (void)edges, (void)n, (void)mode;
    captured = graph;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    (void)stream;
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = captured;
    captured = NULL;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *n) {
    (void)stream, (void)dependencies, (void)n;
    if (id)
        *id = 1;
    *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (graph)
        *graph = captured;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    return cuStreamEndCapture(stream, graph);
}

CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                        CUgraph *graph, const CUgraphNode **dependencies, size_t *n) {
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, n);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    (void)stream;
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return context == current ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int n, unsigned int flags,
                        CUdevice device) {
    (void)affinity, (void)n;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get) {
    (void)display, (void)get;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get) {
    return cuVDPAUCtxCreate(context, flags, device, display, get);
}

CUresult cuCtxDestroy(CUcontext context) {
    return cuCtxDestroy_v2(context);
}

CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    (void)flags;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = current;
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxDetach(CUcontext context) {
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit, (void)value;
    return failing ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    NEED(context);
    (void)resources, (void)device, (void)flags;
    *context = (CUgreenCtx)take(512);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx context) {
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return cuDevicePrimaryCtxRelease_v2(device);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return cuDevicePrimaryCtxReset_v2(device);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    NEED(module && image);
    *module = (CUmodule)take(512);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    return cuModuleLoadData(module, path);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n, CUjit_option *options, void **values) {
    (void)n, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleUnload(CUmodule module) {
    return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* As FENKA_NULL_LAZY says. */
CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    *mode = getenv("FENKA_NULL_LAZY") ? CU_MODULE_LAZY_LOADING : CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *a, void **b, unsigned int c,
                           CUlibraryOption *d, void **e, unsigned int f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    return cuModuleLoadData((CUmodule *)library, image);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *a, void **b, unsigned int c,
                               CUlibraryOption *d, void **e, unsigned int f) {
    return cuLibraryLoadData(library, path, a, b, c, d, e, f);
}

CUresult cuLibraryUnload(CUlibrary library) {
    return cuModuleUnload((CUmodule)library);
}

/* No function of a driver's: a context that was made where nobody saw it, for tests. */
CUresult cuNullContext(CUcontext *context, int device) {
    *context = (CUcontext)(contexts[device] + 32);
    return CUDA_SUCCESS;
}
