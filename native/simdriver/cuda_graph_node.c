/* The parameters of a graph's nodes, by the functions of each type and by the generic ones. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static bool is(CUgraphNode node, CUgraphNodeType type) { return graph_node(node) && node->work.type == type; }

/* A kernel's arguments are copied again; the work is the node's afterwards. */
static CUresult set(CUgraphNode node, const struct graph_work *work) {
    graph_set_work(node, work);
    return work->type == CU_GRAPH_NODE_TYPE_KERNEL ? graph_copy_arguments(node) : CUDA_SUCCESS;
}

#define NODE_GETTER(name, kind, type, expression)          \
    CUresult name(CUgraphNode node, type *what) {          \
        TRY(driver_ready());                               \
        if (!what || !is(node, CU_GRAPH_NODE_TYPE_##kind)) \
            return CUDA_ERROR_INVALID_VALUE;               \
        *what = (expression);                              \
        return CUDA_SUCCESS;                               \
    }
NODE_GETTER(cuGraphKernelNodeGetParams_v2, KERNEL, CUDA_KERNEL_NODE_PARAMS, node->work.kernel)
NODE_GETTER(cuGraphMemcpyNodeGetParams, MEMCPY, CUDA_MEMCPY3D, node->work.copy)
NODE_GETTER(cuGraphMemsetNodeGetParams, MEMSET, CUDA_MEMSET_NODE_PARAMS, node->work.set)
NODE_GETTER(cuGraphHostNodeGetParams, HOST, CUDA_HOST_NODE_PARAMS, node->work.host)
NODE_GETTER(cuGraphEventRecordNodeGetEvent, EVENT_RECORD, CUevent, node->work.event)
NODE_GETTER(cuGraphEventWaitNodeGetEvent, WAIT_EVENT, CUevent, node->work.event)

CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *what) {
    CUDA_KERNEL_NODE_PARAMS full;
    TRY(cuGraphKernelNodeGetParams_v2(node, &full));
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(what, &full, sizeof *what); /* the newer struct begins with the older one */
    return CUDA_SUCCESS;
}

/* ---- what a program asks for, as work ---- */

static CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS *what, struct graph_work *work) {
    struct CUfunc_st *function;
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(function_resolve(what->func ? (void *)what->func : (void *)what->kern, &function));
    if ((uint64_t)what->gridDimX * what->gridDimY * what->gridDimZ == 0 ||
        (uint64_t)what->blockDimX * what->blockDimY * what->blockDimZ == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *work = (struct graph_work){.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *what};
    work->kernel.func = function;
    return CUDA_SUCCESS;
}

static CUresult copy_work(const CUDA_MEMCPY3D *what, struct graph_work *work) {
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    *work = (struct graph_work){.type = CU_GRAPH_NODE_TYPE_MEMCPY, .copy = *what};
    return CUDA_SUCCESS;
}

static CUresult set_work(const CUDA_MEMSET_NODE_PARAMS *what, struct graph_work *work) {
    if (!what || (what->elementSize != 1 && what->elementSize != 2 && what->elementSize != 4))
        return CUDA_ERROR_INVALID_VALUE;
    *work = (struct graph_work){.type = CU_GRAPH_NODE_TYPE_MEMSET, .set = *what};
    return CUDA_SUCCESS;
}

static CUresult host_work(const CUDA_HOST_NODE_PARAMS *what, struct graph_work *work) {
    if (!what || !what->fn)
        return CUDA_ERROR_INVALID_VALUE;
    *work = (struct graph_work){.type = CU_GRAPH_NODE_TYPE_HOST, .host = *what};
    return CUDA_SUCCESS;
}

static CUresult event_work(CUgraphNodeType type, CUevent event, struct graph_work *work) {
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    *work = (struct graph_work){.type = type, .event = event};
    return CUDA_SUCCESS;
}

/* The types whose parameters can change. */
static CUresult work_of(const CUgraphNodeParams *params, struct graph_work *work) {
    switch ((int)params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return kernel_work((const CUDA_KERNEL_NODE_PARAMS *)&params->kernel, work);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return copy_work(&params->memcpy.copyParams, work);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return set_work((const CUDA_MEMSET_NODE_PARAMS *)&params->memset, work);
    case CU_GRAPH_NODE_TYPE_HOST:
        return host_work((const CUDA_HOST_NODE_PARAMS *)&params->host, work);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return event_work(params->type, params->eventRecord.event, work);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return event_work(params->type, params->eventWait.event, work);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

static CUcontext context_of(const CUgraphNodeParams *params) {
    return params->type == CU_GRAPH_NODE_TYPE_MEMCPY   ? params->memcpy.copyCtx
           : params->type == CU_GRAPH_NODE_TYPE_MEMSET ? params->memset.ctx
                                                       : NULL;
}

/* ---- a node of a graph, or its copy in an executable graph ---- */

static CUresult change(CUgraphNode node, CUresult (*what)(const void *, struct graph_work *), const void *params,
                       CUgraphNodeType type) {
    struct graph_work work;
    TRY(driver_ready());
    if (!is(node, type))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(what(params, &work));
    return set(node, &work);
}

#define CHANGE(node, what, type) change(node, (CUresult (*)(const void *, struct graph_work *))what, params, type)

#define NODE_SETTER(name, executable, maker, type, struct_name)                          \
    CUresult name(CUgraphNode node, const struct_name *params) {                         \
        return CHANGE(node, maker, CU_GRAPH_NODE_TYPE_##type);                           \
    }                                                                                    \
    CUresult executable(CUgraphExec exec, CUgraphNode node, const struct_name *params) { \
        return CHANGE(graph_exec_node(exec, node), maker, CU_GRAPH_NODE_TYPE_##type);    \
    }
NODE_SETTER(cuGraphKernelNodeSetParams_v2, cuGraphExecKernelNodeSetParams_v2, kernel_work, KERNEL,
            CUDA_KERNEL_NODE_PARAMS)
NODE_SETTER(cuGraphHostNodeSetParams, cuGraphExecHostNodeSetParams, host_work, HOST, CUDA_HOST_NODE_PARAMS)

static CUresult widened(const CUDA_KERNEL_NODE_PARAMS_v1 *what, CUDA_KERNEL_NODE_PARAMS *full) {
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    *full = (CUDA_KERNEL_NODE_PARAMS){0};
    memcpy(full, what, sizeof *what);
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *what) {
    CUDA_KERNEL_NODE_PARAMS full;
    TRY(widened(what, &full));
    return cuGraphKernelNodeSetParams_v2(node, &full);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *what) {
    CUDA_KERNEL_NODE_PARAMS full;
    TRY(widened(what, &full));
    return cuGraphExecKernelNodeSetParams_v2(exec, node, &full);
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *params) {
    return CHANGE(node, copy_work, CU_GRAPH_NODE_TYPE_MEMCPY);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                        CUcontext context) {
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_VALUE;
    return CHANGE(graph_exec_node(exec, node), copy_work, CU_GRAPH_NODE_TYPE_MEMCPY);
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params) {
    return CHANGE(node, set_work, CU_GRAPH_NODE_TYPE_MEMSET);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params,
                                        CUcontext context) {
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_VALUE;
    return CHANGE(graph_exec_node(exec, node), set_work, CU_GRAPH_NODE_TYPE_MEMSET);
}

static CUresult change_event(CUgraphNode node, CUgraphNodeType type, CUevent event) {
    struct graph_work work;
    TRY(driver_ready());
    if (!is(node, type))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(event_work(type, event, &work));
    return set(node, &work);
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
    return change_event(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
    return change_event(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return change_event(graph_exec_node(exec, node), CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return change_event(graph_exec_node(exec, node), CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

/* ---- the generic functions ---- */

static CUresult change_any(CUgraphNode node, const CUgraphNodeParams *params) {
    struct graph_work work;
    TRY(driver_ready());
    if (!params || !is(node, params->type))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(work_of(params, &work));
    node->context = context_of(params) ? context_of(params) : node->context;
    return set(node, &work);
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params) { return change_any(node, params); }

CUresult cuGraphNodeSetParams_v2(CUgraphNode node, CUgraphNodeParams *params) { return change_any(node, params); }

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
    return change_any(graph_exec_node(exec, node), params);
}

CUresult cuGraphNodeGetParams(CUgraphNode node, CUgraphNodeParams *params) {
    TRY(driver_ready());
    if (!params || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    const struct graph_work *work = &node->work;
    *params = (CUgraphNodeParams){.type = work->type};
    switch ((int)work->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        memcpy(&params->kernel, &work->kernel, sizeof params->kernel);
        break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        params->memcpy = (CUDA_MEMCPY_NODE_PARAMS){.copyCtx = node->context, .copyParams = work->copy};
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        memcpy(&params->memset, &work->set, sizeof work->set);
        params->memset.ctx = node->context;
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
        memcpy(&params->host, &work->host, sizeof work->host);
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        params->graph.graph = work->child;
        break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        params->eventRecord.event = work->event;
        break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        params->eventWait.event = work->event;
        break;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        memcpy(&params->alloc, &work->taken.asked, sizeof params->alloc);
        break;
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        params->free.dptr = work->freed;
        break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        params->conditional = (CUDA_CONDITIONAL_NODE_PARAMS){
            work->condition.handle, work->condition.kind, work->condition.size, work->condition.bodies, node->context};
        break;
    default:
        break;
    }
    return CUDA_SUCCESS;
}

static CUresult add_conditional(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                                CUDA_CONDITIONAL_NODE_PARAMS *params) {
    unsigned most = params->type == CU_GRAPH_COND_TYPE_IF ? 2 : params->type == CU_GRAPH_COND_TYPE_WHILE ? 1 : 1024;
    if (!object_get(graph, GRAPH) || !graph_condition_known(graph, params->handle) || params->size == 0 ||
        params->size > most || (unsigned)params->type > CU_GRAPH_COND_TYPE_SWITCH)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
    work.condition.handle = params->handle;
    work.condition.kind = params->type;
    work.condition.size = params->size;
    work.condition.bodies = calloc(params->size, sizeof *work.condition.bodies);
    bool whole = work.condition.bodies;
    for (unsigned i = 0; whole && i < params->size; i++) {
        work.condition.bodies[i] = graph_new();
        whole = work.condition.bodies[i];
        if (whole)
            work.condition.bodies[i]->inner = true;
    }
    CUresult result = whole ? graph_add(graph, needs, count, &work, node) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        graph_work_release(&work);
        return result;
    }
    (*node)->context = params->ctx;
    params->phGraph_out = work.condition.bodies;
    return CUDA_SUCCESS;
}

/* The types that have functions of their own are made by these. */
static CUresult add_other(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                          CUgraphNodeParams *params) {
    struct graph_work work;
    switch ((int)params->type) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return cuGraphAddEmptyNode(node, graph, needs, count);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return cuGraphAddChildGraphNode(node, graph, needs, count, params->graph.graph);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return cuGraphAddMemAllocNode(node, graph, needs, count, (CUDA_MEM_ALLOC_NODE_PARAMS *)&params->alloc);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return cuGraphAddMemFreeNode(node, graph, needs, count, params->free.dptr);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return add_conditional(node, graph, needs, count, &params->conditional);
    default:
        TRY(work_of(params, &work));
        TRY(graph_add(graph, needs, count, &work, node));
        (*node)->context = context_of(params);
        return CUDA_SUCCESS;
    }
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, const CUgraphEdgeData *edges,
                           size_t count, CUgraphNodeParams *params) {
    TRY(driver_ready());
    if (!node || !params)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(add_other(node, graph, needs, count, params));
    for (size_t i = 0; edges && i < count; i++)
        (*node)->edges[i] = edges[i];
    return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
                        CUgraphNodeParams *params) {
    return cuGraphAddNode_v2(node, graph, needs, NULL, count, params);
}

CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, const CUgraphEdgeData *edges,
                           size_t count, CUgraphNodeParams *params) {
    return cuGraphAddNode_v2(node, graph, needs, edges, count, params);
}

/* ---- attributes of kernels' launches ---- */

static CUresult attribute_fits(CUgraphNode node, CUkernelNodeAttrID attribute) {
    TRY(driver_ready());
    bool fits = is(node, CU_GRAPH_NODE_TYPE_KERNEL) && (unsigned)attribute < CU_LAUNCH_ATTRIBUTE_MAX;
    if (fits && !node->launch)
        node->launch = calloc(CU_LAUNCH_ATTRIBUTE_MAX, sizeof *node->launch);
    return !fits ? CUDA_ERROR_INVALID_VALUE : node->launch ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue *value) {
    TRY(attribute_fits(node, attribute));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    *value = node->launch[attribute];
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value) {
    TRY(attribute_fits(node, attribute));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    node->launch[attribute] = *value;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
    TRY(attribute_fits(to, CU_LAUNCH_ATTRIBUTE_IGNORE));
    TRY(attribute_fits(from, CU_LAUNCH_ATTRIBUTE_IGNORE));
    if (to != from)
        memcpy(to->launch, from->launch, CU_LAUNCH_ATTRIBUTE_MAX * sizeof *to->launch);
    return CUDA_SUCCESS;
}
