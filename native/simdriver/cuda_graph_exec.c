/* Executable graphs. A launch runs the nodes one after another on the stream, so it takes the sum of its kernels'
 * time. */
#include <stddef.h>

#include "graph.h"

#define KNOWN_FLAGS                                                                         \
    (CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | \
     CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)

struct CUgraphExec_st {
    struct object object;
    CUcontext context;
    unsigned long long flags;
    CUgraph copy; /* its nodes are in the order in which they run */
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

static CUresult run(CUgraph graph, CUcontext context, CUstream stream, bool free_first) {
    for (CUgraphNode node = graph->first; node; node = node->next)
        if (node->work.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
            unsigned value = graph_condition_value(graph, node->work.condition.handle);
            bool chosen = node->work.condition.kind == CU_GRAPH_COND_TYPE_SWITCH;
            unsigned body = chosen ? value : value ? 0 : 1; /* the second body of an "if" is its "else" */
            if (body < node->work.condition.size)
                TRY(run(node->work.condition.bodies[body], context, stream, free_first));
        } else if (!node->disabled) {
            TRY(graph_work_run(&node->work, context, stream, free_first));
        }
    return CUDA_SUCCESS;
}

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
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return run(work->child, context, stream, free_first);
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

/* Sorts the nodes by their dependencies, also in inner graphs; false if those are cyclic. */
static bool order(CUgraph graph) {
    CUgraphNode waiting = graph->first, last = NULL;
    size_t placed = 0;
    for (CUgraphNode node = waiting; node; node = node->next)
        node->placed = false;
    graph->first = NULL;
    for (size_t before = SIZE_MAX; placed != before;) {
        before = placed;
        for (CUgraphNode *at = &waiting, node; (node = *at);) {
            if (!ready(node)) {
                at = &node->next;
                continue;
            }
            *at = node->next;
            node->next = NULL;
            *(last ? &last->next : &graph->first) = node;
            last = node;
            node->placed = true;
            placed++;
        }
    }
    *(last ? &last->next : &graph->first) = waiting;
    bool whole = !waiting;
    while (last && last->next)
        last = last->next;
    graph->last = last ? last : waiting;
    for (CUgraphNode node = graph->first; whole && node; node = node->next) {
        if (node->work.type == CU_GRAPH_NODE_TYPE_GRAPH)
            whole = order(node->work.child);
        for (unsigned i = 0;
             whole && node->work.type == CU_GRAPH_NODE_TYPE_CONDITIONAL && i < node->work.condition.size; i++)
            whole = order(node->work.condition.bodies[i]);
    }
    return whole;
}

/* An ordered copy. */
static CUresult prepare(CUgraph graph, CUgraph *copy) {
    *copy = graph_clone(graph);
    if (!*copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (order(*copy))
        return CUDA_SUCCESS;
    graph_delete(*copy);
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    CUcontext context;
    CUgraph copy;
    TRY(context_current(&context));
    if (!out || !object_get(graph, GRAPH) || flags & ~(unsigned long long)KNOWN_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(prepare(graph, &copy));
    CUgraphExec exec = object_new(EXEC, sizeof *exec, context);
    if (!exec) {
        graph_delete(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    exec->context = context;
    exec->flags = flags;
    exec->copy = copy;
    *out = exec;
    return CUDA_SUCCESS;
}

CUgraphNode graph_exec_node(CUgraphExec exec, CUgraphNode node) {
    return object_get(exec, EXEC) && graph_node(node) ? graph_find(exec->copy, node) : NULL;
}

CUresult cuGraphExecGetId(CUgraphExec exec, unsigned int *id) {
    TRY(driver_ready());
    if (!id || !object_get(exec, EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    *id = exec->copy->id;
    return CUDA_SUCCESS;
}

/* Only kernels, copies and fills can be switched off. */
static CUgraphNode switchable(CUgraphExec exec, CUgraphNode original) {
    CUgraphNode node = graph_exec_node(exec, original);
    return node && node->work.type <= CU_GRAPH_NODE_TYPE_MEMSET ? node : NULL;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode original, unsigned int enabled) {
    TRY(driver_ready());
    CUgraphNode node = switchable(exec, original);
    if (!node)
        return CUDA_ERROR_INVALID_VALUE;
    node->disabled = !enabled;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode original, unsigned int *enabled) {
    TRY(driver_ready());
    CUgraphNode node = switchable(exec, original);
    if (!node || !enabled)
        return CUDA_ERROR_INVALID_VALUE;
    *enabled = !node->disabled;
    return CUDA_SUCCESS;
}

/* ---- updates ---- */

static CUgraphExecUpdateResult differs_inside(CUgraph ours, CUgraph theirs, CUgraphNode *wrong);

static CUgraphExecUpdateResult differs(CUgraphNode ours, CUgraphNode theirs, CUgraphNode *wrong) {
    *wrong = theirs;
    if (ours->work.type != theirs->work.type)
        return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (ours->needs_count != theirs->needs_count)
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    if (ours->work.type == CU_GRAPH_NODE_TYPE_GRAPH)
        return differs_inside(ours->work.child, theirs->work.child, wrong);
    if (ours->work.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        if (ours->work.condition.kind != theirs->work.condition.kind ||
            ours->work.condition.size != theirs->work.condition.size)
            return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
        for (unsigned i = 0; i < ours->work.condition.size; i++) {
            CUgraphExecUpdateResult inside =
                differs_inside(ours->work.condition.bodies[i], theirs->work.condition.bodies[i], wrong);
            if (inside != CU_GRAPH_EXEC_UPDATE_SUCCESS)
                return inside;
        }
    }
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUgraphExecUpdateResult differs_inside(CUgraph ours, CUgraph theirs, CUgraphNode *wrong) {
    *wrong = NULL;
    if (ours->count != theirs->count)
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    CUgraphNode other = theirs->first;
    for (CUgraphNode node = ours->first; node && other; node = node->next, other = other->next) {
        CUgraphExecUpdateResult result = differs(node, other, wrong);
        if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
            return result;
    }
    *wrong = NULL;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

/* The copy of another graph of the same shape takes the place of the one that runs. */
CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
    CUgraph copy;
    CUgraphNode wrong = NULL;
    TRY(driver_ready());
    if (!object_get(exec, EXEC) || !object_get(graph, GRAPH) || !info)
        return CUDA_ERROR_INVALID_VALUE;
    *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    TRY(prepare(graph, &copy));
    info->result = differs_inside(exec->copy, copy, &wrong);
    if (info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS) {
        graph_delete(exec->copy);
        exec->copy = copy;
        return CUDA_SUCCESS;
    }
    for (CUgraphNode node = graph->first; wrong && node; node = node->next)
        if (node->id == wrong->origin)
            info->errorNode = node;
    graph_delete(copy);
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *wrong, CUgraphExecUpdateResult *result) {
    CUgraphExecUpdateResultInfo info = {.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    CUresult code = cuGraphExecUpdate_v2(exec, graph, &info);
    if (wrong)
        *wrong = info.errorNode;
    if (result)
        *result = info.result;
    return code;
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
    CUgraph copy = exec->copy;
    object_delete(exec);
    graph_delete(copy);
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
    return run(exec->copy, context, handle, free_first);
}
