/* Executable graphs. A launch runs the nodes one after another on the stream, so it takes the sum of its kernels'
 * time. */
#include <stdlib.h>

#include "graph.h"

#define KNOWN_FLAGS                                                                         \
    (CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | \
     CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)

struct CUgraphExec_st {
    struct object object;
    CUcontext context;
    unsigned long long flags;
    size_t count;
    struct graph_work *works;
};

static CUmemPool_attribute as_pool(CUgraphMem_attribute attribute) {
    static const CUmemPool_attribute same[] = {
        [CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT] = CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH] = CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        [CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT] = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        [CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    };
    return (unsigned)attribute < sizeof same / sizeof *same ? same[attribute] : CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (as_pool(attribute) == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        return CUDA_ERROR_INVALID_VALUE;
    return cuMemPoolGetAttribute(pool_of_graphs(device), as_pool(attribute), value);
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (as_pool(attribute) == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        return CUDA_ERROR_INVALID_VALUE;
    return cuMemPoolSetAttribute(pool_of_graphs(device), as_pool(attribute), value);
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    return cuMemPoolTrimTo(pool_of_graphs(device), 0);
}

/* ---- work ---- */

static CUresult record(CUevent event, CUstream stream) { return cuEventRecord(event, stream); }

CUresult graph_work_run(const struct graph_work *work, CUcontext context, CUstream stream, bool free_first) {
    switch ((int)work->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return cuLaunchKernel(work->kernel.func, work->kernel.gridDimX, work->kernel.gridDimY, work->kernel.gridDimZ,
                              work->kernel.blockDimX, work->kernel.blockDimY, work->kernel.blockDimZ, 0, stream, NULL,
                              NULL);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return box_copy(&work->copy);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return set_rows(&work->set);
    case CU_GRAPH_NODE_TYPE_HOST:
        return cuLaunchHostFunc(stream, work->host.fn, work->host.userData);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return record(work->event, stream);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return cuStreamWaitEvent(stream, work->event, 0);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return graph_memory_take(work->taken.memory, context, free_first);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return cuMemFreeAsync(work->freed, stream);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* ---- instantiation ---- */

static bool ready(const struct CUgraphNode_st *node) {
    for (size_t i = 0; i < node->needs_count; i++)
        if (!node->needs[i]->placed)
            return false;
    return !node->placed;
}

/* Sorts the nodes by their dependencies; false if those are cyclic. */
static bool order(CUgraph graph, struct graph_work *works) {
    size_t placed = 0;
    for (CUgraphNode node = graph->first; node; node = node->next)
        node->placed = false;
    for (size_t before = SIZE_MAX; placed != before && placed < graph->count;) {
        before = placed;
        for (CUgraphNode node = graph->first; node; node = node->next)
            if (ready(node)) {
                node->placed = true;
                works[placed++] = node->work;
            }
    }
    return placed == graph->count;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    CUcontext context;
    TRY(context_current(&context));
    if (!out || !object_get(graph, GRAPH) || flags & ~(unsigned long long)KNOWN_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec exec = object_new(EXEC, sizeof *exec, context);
    struct graph_work *works = calloc(graph->count + 1, sizeof *works);
    bool ordered = exec && works && order(graph, works);
    if (!ordered) {
        CUresult why = exec && works ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
        if (exec)
            object_delete(exec);
        free(works);
        return why;
    }
    exec->context = context;
    exec->flags = flags;
    exec->count = graph->count;
    exec->works = works;
    for (size_t i = 0; i < exec->count; i++)
        if (works[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            graph_memory_hold(works[i].taken.memory, 1);
    *out = exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *wrong, char *log, size_t room) {
    if (wrong)
        *wrong = NULL;
    if (log && room)
        *log = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how) {
    if (!how)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuGraphInstantiateWithFlags(exec, graph, how->flags);
    how->hErrNode_out = NULL;
    how->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags) {
    TRY(driver_ready());
    if (!flags || !object_get(exec, EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    TRY(driver_ready());
    if (!object_get(exec, EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < exec->count; i++)
        if (exec->works[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            graph_memory_hold(exec->works[i].taken.memory, -1);
    free(exec->works);
    object_delete(exec);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    return object_get(exec, EXEC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!object_get(exec, EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    if (stream_capturing(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    bool free_first = exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    for (size_t i = 0; i < exec->count; i++)
        TRY(graph_work_run(&exec->works[i], context, handle, free_first));
    return CUDA_SUCCESS;
}
