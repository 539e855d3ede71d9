/* Graphs: memory nodes are charged when they are added, and launches are charged as a whole. */
#include "card_bytes.h"
#include "control.h"
#include "cost_table.h"
#include "graph_memory.h"
#include "launch_cost.h"

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    struct target target;
    uint64_t taken = p ? card_bytes_of_node(p->bytesize) : 0;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_BY(graphs_charge, &target, target_location(&target, p->poolProps.location), taken);
    CUresult result = REAL(cuGraphAddMemAllocNode)(node, graph, dependencies, count, p);
    return graphs_charge_commit(result, &target, taken, graph, result ? 0 : p->dptr);
}

static CUresult add_free_end(CUresult result, CUgraph graph, CUdeviceptr freed) {
    if (result == CUDA_SUCCESS && freed)
        graphs_add_free_node(graph, freed, 0);
    return result;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUdeviceptr pointer) {
    return add_free_end(REAL(cuGraphAddMemFreeNode)(node, graph, dependencies, count, pointer), graph, pointer);
}

#define ADD(p, call)                                                                                          \
    do {                                                                                                      \
        struct target target_;                                                                                \
        if (!p || p->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)                                                    \
            return add_free_end(call, graph, p && p->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? p->free.dptr : 0); \
        uint64_t taken_ = card_bytes_of_node(p->alloc.bytesize);                                              \
        CHARGE_BY(graphs_charge, &target_, target_location(&target_, p->alloc.poolProps.location), taken_);   \
        CUresult result_ = call;                                                                              \
        return graphs_charge_commit(result_, &target_, taken_, graph, result_ ? 0 : p->alloc.dptr);           \
    } while (0)

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                        CUgraphNodeParams *p) {
    ADD(p, REAL(cuGraphAddNode)(node, graph, dependencies, count, p));
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *p) {
    ADD(p, REAL(cuGraphAddNode_v2)(node, graph, dependencies, edges, count, p));
}

CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *p) {
    ADD(p, REAL(cuGraphAddNode_v3)(node, graph, dependencies, edges, count, p));
}

static CUresult instantiate_end(CUresult result, CUgraphExec *exec, CUgraph graph) {
    if (result == CUDA_SUCCESS)
        graphs_instantiated(*exec, graph);
    return result;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    return instantiate_end(REAL(cuGraphInstantiate)(exec, graph, error, log, room), exec, graph);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    return instantiate_end(REAL(cuGraphInstantiate_v2)(exec, graph, error, log, room), exec, graph);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiate_end(REAL(cuGraphInstantiateWithFlags)(exec, graph, flags), exec, graph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return instantiate_end(REAL(cuGraphInstantiateWithParams)(exec, graph, p), exec, graph);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return instantiate_end(REAL(cuGraphInstantiateWithParams_ptsz)(exec, graph, p), exec, graph);
}

static CUresult graph_launch_end(CUresult result, CUgraphExec exec) {
    if (result == CUDA_SUCCESS)
        graphs_launched(exec);
    return result;
}

#define LAUNCH(call, stream)                                               \
    do {                                                                   \
        struct launch launch_;                                             \
        if (__builtin_expect(!control_limits_compute(), 1))                \
            return graph_launch_end(call, exec);                           \
        launch_begin(&launch_, launch_cost_graph_key(exec), stream);       \
        return graph_launch_end(launch_end(&launch_, call, stream), exec); \
    } while (0)

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { LAUNCH(REAL(cuGraphLaunch)(exec, stream), stream); }

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    LAUNCH(REAL(cuGraphLaunch_ptsz)(exec, stream), stream ? stream : CU_STREAM_PER_THREAD);
}

CUresult cuGraphDestroy(CUgraph graph) {
    CUresult result = REAL(cuGraphDestroy)(graph);
    if (result == CUDA_SUCCESS)
        graphs_release((uint64_t)graph);
    return result;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    struct allocation allocation;
    bool ours = free_begin(EXEC, (uint64_t)exec, &allocation);
    CUresult result = free_end(REAL(cuGraphExecDestroy)(exec), ours, &allocation);
    if (result == CUDA_SUCCESS && control_limits_compute())
        cost_table_invalidate(launch_cost_graph_key(exec));
    if (result == CUDA_SUCCESS && ours)
        graphs_release(allocation.owner);
    return result;
}
