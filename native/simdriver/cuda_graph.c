/* Building graphs. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) {
    TRY(driver_ready());
    if (!graph || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = graph_new();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphDestroy(CUgraph graph) {
    TRY(driver_ready());
    if (!object_get(graph, GRAPH) || graph->inner)
        return CUDA_ERROR_INVALID_VALUE;
    graph_delete(graph);
    return CUDA_SUCCESS;
}

/* ---- nodes ---- */

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS *what) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    if (!node || !what)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(function_resolve(what->func ? (void *)what->func : (void *)what->kern, &function));
    if ((uint64_t)what->gridDimX * what->gridDimY * what->gridDimZ == 0 ||
        (uint64_t)what->blockDimX * what->blockDimY * what->blockDimZ == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *what};
    work.kernel.func = function;
    return graph_add(graph, needs, count, &work, node);
}

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1 *what) {
    CUDA_KERNEL_NODE_PARAMS full = {0};
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&full, what, sizeof *what); /* the newer struct begins with the older one */
    return cuGraphAddKernelNode_v2(node, graph, needs, count, &full);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                              const CUDA_MEMCPY3D *what, CUcontext context) {
    TRY(driver_ready());
    if (!node || !what || !context_valid(context))
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEMCPY, .copy = *what};
    TRY(graph_add(graph, needs, count, &work, node));
    (*node)->context = context;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS *what, CUcontext context) {
    TRY(driver_ready());
    if (!node || !what || !context_valid(context) ||
        (what->elementSize != 1 && what->elementSize != 2 && what->elementSize != 4))
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEMSET, .set = *what};
    TRY(graph_add(graph, needs, count, &work, node));
    (*node)->context = context;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                            const CUDA_HOST_NODE_PARAMS *what) {
    TRY(driver_ready());
    if (!node || !what || !what->fn)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = *what};
    return graph_add(graph, needs, count, &work, node);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count) {
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
    TRY(driver_ready());
    return node ? graph_add(graph, needs, count, &work, node) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult add_event(CUgraphNodeType type, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs,
                          size_t count, CUevent event) {
    struct graph_work work = {.type = type, .event = event};
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    return node ? graph_add(graph, needs, count, &work, node) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                   CUevent event) {
    return add_event(CU_GRAPH_NODE_TYPE_EVENT_RECORD, node, graph, needs, count, event);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                 CUevent event) {
    return add_event(CU_GRAPH_NODE_TYPE_WAIT_EVENT, node, graph, needs, count, event);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *what) {
    uint32_t card;
    TRY(driver_ready());
    if (!node || !what || what->bytesize == 0 || what->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        what->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_card(what->poolProps.location.id, &card));
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    TRY(graph_memory_new(what->poolProps.location.id, what->bytesize, &work.taken.memory));
    what->dptr = work.taken.memory->base;
    work.taken.asked = *what;
    CUresult result = graph_add(graph, needs, count, &work, node);
    if (result != CUDA_SUCCESS)
        graph_memory_hold(work.taken.memory, -1);
    return result;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *what) {
    TRY(driver_ready());
    if (!what || !object_get(node, NODE) || node->work.type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        return CUDA_ERROR_INVALID_VALUE;
    *what = node->work.taken.asked;
    return CUDA_SUCCESS;
}

static bool frees(CUgraph graph, CUdeviceptr pointer) {
    for (CUgraphNode node = graph->first; node; node = node->next)
        if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_FREE && node->work.freed == pointer)
            return true;
    return false;
}

/* Frees the memory of an allocation node of any graph, at most once per graph. */
CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                               CUdeviceptr pointer) {
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .freed = pointer};
    TRY(driver_ready());
    if (!node || !object_get(graph, GRAPH) || !graph_memory_known(pointer) || frees(graph, pointer))
        return CUDA_ERROR_INVALID_VALUE;
    return graph_add(graph, needs, count, &work, node);
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer) {
    TRY(driver_ready());
    if (!pointer || !object_get(node, NODE) || node->work.type != CU_GRAPH_NODE_TYPE_MEM_FREE)
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = node->work.freed;
    return CUDA_SUCCESS;
}

/* The node has a copy of the graph. */
CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                  CUgraph child) {
    TRY(driver_ready());
    if (!node || !object_get(graph, GRAPH) || !object_get(child, GRAPH) || graph == child)
        return CUDA_ERROR_INVALID_VALUE;
    if (graph_has(child, CU_GRAPH_NODE_TYPE_MEM_ALLOC) || graph_has(child, CU_GRAPH_NODE_TYPE_MEM_FREE) ||
        graph_has(child, CU_GRAPH_NODE_TYPE_CONDITIONAL))
        return CUDA_ERROR_NOT_SUPPORTED;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = graph_clone(child)};
    if (!work.child)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work.child->inner = true;
    CUresult result = graph_add(graph, needs, count, &work, node);
    if (result != CUDA_SUCCESS)
        graph_work_release(&work);
    return result;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) {
    TRY(driver_ready());
    if (!graph || !graph_node(node) || node->work.type != CU_GRAPH_NODE_TYPE_GRAPH)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = node->work.child;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode node) {
    TRY(driver_ready());
    if (!graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node->work.type == CU_GRAPH_NODE_TYPE_MEM_FREE)
        return CUDA_ERROR_NOT_SUPPORTED;
    graph_remove(node);
    return CUDA_SUCCESS;
}
