/* Memory nodes of graphs, added one by one or by capturing a stream.
 *
 * Every launch takes the memory again, whatever was freed after the last one, and the device keeps it between
 * launches; so it stays charged until the graph and its executable forms are gone. The driver allows one such
 * form at a time, and neither clones nor removes such nodes: owners need no more than a count.
 *
 * What a launch took and nobody freed outlives the graph, and is then memory like any other. Freed it is after the
 * launch by the program, or by a node when an executable form that has this node is launched, of the same graph or
 * of another. */
#include "hook_graph.h"

#include <string.h>

#include "hook_context.h"
#include "control.h"
#include "launch_cost.h"
#include "hook_launch.h"
#include "os.h"
#include "pools.h"

static bool any; /* graph with memory was ever made: else launches and frees are none of our business */

/* ---- nodes that free ---- */

struct free_node {
    uint64_t graph, pointer;
    uint64_t number;  /* in the order of adding */
    uint64_t capture; /* that has not ended */
};

static struct os_lock adding;
static struct free_node *free_nodes;
static uint64_t nodes_added;
static size_t nodes, room;

void graphs_reset(void) {
    adding.held = 0;
    free_nodes = NULL;
    nodes = room = 0;
}

static uint64_t next_number(void) {
    return __atomic_fetch_add(&nodes_added, 1, __ATOMIC_RELAXED);
}

static bool more_room(void) {
    size_t wanted = room ? room * 2 : 256;
    struct free_node *made = os_alloc_pages(wanted * sizeof *made);
    if (!made)
        return false;
    if (nodes) {
        memcpy(made, free_nodes, nodes * sizeof *made);
        os_unmap(free_nodes, room * sizeof *made);
    }
    free_nodes = made;
    room = wanted;
    return true;
}

static void forget_free_nodes(uint64_t graph) {
    os_lock(&adding);
    for (size_t i = 0; i < nodes;)
        if (free_nodes[i].graph == graph)
            free_nodes[i] = free_nodes[--nodes];
        else
            i++;
    os_unlock(&adding);
}

static void run_free_nodes(uint64_t graph, uint64_t before) {
    os_lock(&adding);
    for (size_t i = 0; i < nodes; i++)
        if (free_nodes[i].graph == graph && free_nodes[i].number < before && !free_nodes[i].capture)
            graphs_memory_freed(free_nodes[i].pointer);
    os_unlock(&adding);
}

static void remember(uint64_t graph) {
    struct allocation old, seen = {.key = graph, .references = 1, .kind = GRAPH, .card = NO_CARD};
    if (!allocations_find(GRAPH, graph, &old))
        allocations_put(seen, &old);
    __atomic_store_n(&any, true, __ATOMIC_RELAXED);
}

/* Without host memory for it what it frees stays charged. */
void graphs_add_free_node(CUgraph graph, CUdeviceptr pointer, uint64_t capture) {
    remember((uint64_t)graph);
    os_lock(&adding);
    if (nodes < room || more_room())
        free_nodes[nodes++] = (struct free_node){(uint64_t)graph, pointer, next_number(), capture};
    os_unlock(&adding);
}

void graphs_capture_ended(uint64_t capture, CUgraph graph) {
    os_lock(&adding);
    for (size_t i = 0; i < nodes;) {
        struct free_node *node = &free_nodes[i++];
        if (node->capture != capture)
            continue;
        if (graph)
            *node = (struct free_node){(uint64_t)graph, node->pointer, next_number(), 0};
        else
            free_nodes[--i] = free_nodes[--nodes];
    }
    os_unlock(&adding);
}

/* ---- */

CUresult graphs_charge_commit(CUresult result, struct target *target, uint64_t bytes, CUgraph graph, CUdeviceptr pointer) {
    if (result == CUDA_SUCCESS)
        remember((uint64_t)graph);
    if (result == CUDA_SUCCESS && target->card != NO_CARD)
        pools_graph_memory(target->card, (int64_t)bytes);
    target->owner = (uint64_t)graph;
    return charge_commit(result, target, bytes, NODE, pointer);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    struct target target;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_OR_RETURN(&target, target_location(&target, p->poolProps.location), p->bytesize);
    CUresult result = REAL(cuGraphAddMemAllocNode)(node, graph, dependencies, count, p);
    return graphs_charge_commit(result, &target, p->bytesize, graph, result ? 0 : p->dptr);
}

static CUresult added(CUresult result, CUgraph graph, CUdeviceptr freed) {
    if (result == CUDA_SUCCESS && freed)
        graphs_add_free_node(graph, freed, 0);
    return result;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUdeviceptr pointer) {
    return added(REAL(cuGraphAddMemFreeNode)(node, graph, dependencies, count, pointer), graph, pointer);
}

#define ADD(p, call)                                                                                 \
    do {                                                                                             \
        struct target target_;                                                                         \
        if (!p || p->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)                                           \
            return added(call, graph, p && p->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? p->free.dptr : 0);      \
        CHARGE_OR_RETURN(&target_, target_location(&target_, p->alloc.poolProps.location), p->alloc.bytesize); \
        CUresult result_ = call;                                                                     \
        return graphs_charge_commit(result_, &target_, p->alloc.bytesize, graph, result_ ? 0 : p->alloc.dptr); \
    } while (0)

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                        CUgraphNodeParams *p) {
    ADD(p, REAL(cuGraphAddNode)(node, graph, dependencies, count, p));
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *p) {
    ADD(p, REAL(cuGraphAddNode_v2)(node, graph, dependencies, edges, count, p));
}

static CUresult instantiated(CUresult result, CUgraphExec *exec, CUgraph graph) {
    struct allocation old, made = {.owner = (uint64_t)graph, .references = 1, .kind = EXEC, .card = NO_CARD};
    if (result != CUDA_SUCCESS || !allocations_retain(GRAPH, (uint64_t)graph))
        return result;
    made.key = (uint64_t)*exec;
    made.bytes = __atomic_load_n(&nodes_added, __ATOMIC_RELAXED); /* later nodes are not in it */
    allocations_put(made, &old);
    return result;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    return instantiated(REAL(cuGraphInstantiate)(exec, graph, error, log, room), exec, graph);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room) {
    return instantiated(REAL(cuGraphInstantiate_v2)(exec, graph, error, log, room), exec, graph);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiated(REAL(cuGraphInstantiateWithFlags)(exec, graph, flags), exec, graph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return instantiated(REAL(cuGraphInstantiateWithParams)(exec, graph, p), exec, graph);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    return instantiated(REAL(cuGraphInstantiateWithParams_ptsz)(exec, graph, p), exec, graph);
}

static CUresult launched(CUresult result, CUgraphExec exec) {
    struct allocation allocation;
    if (__builtin_expect(__atomic_load_n(&any, __ATOMIC_RELAXED), 0) && result == CUDA_SUCCESS &&
        allocations_find(EXEC, (uint64_t)exec, &allocation)) {
        allocations_count_launch(allocation.owner);
        run_free_nodes(allocation.owner, allocation.bytes);
    }
    return result;
}

#define LAUNCH(call, stream)                                                            \
    do {                                                                                \
        struct launch launch_;                                                          \
        if (__builtin_expect(!control_limits_compute(), 1))                             \
            return launched(call, exec);                                                \
        launch_begin(&launch_, launch_cost_graph_key(exec), stream);                          \
        return launched(launch_end(&launch_, call, stream), exec);                     \
    } while (0)

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    LAUNCH(REAL(cuGraphLaunch)(exec, stream), stream);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    LAUNCH(REAL(cuGraphLaunch_ptsz)(exec, stream), stream ? stream : CU_STREAM_PER_THREAD);
}

void graphs_memory_freed(CUdeviceptr pointer) {
    struct allocation node, graph;
    if (__atomic_load_n(&any, __ATOMIC_RELAXED) && allocations_find(NODE, pointer, &node) &&
        allocations_find(GRAPH, node.owner, &graph))
        allocations_node_freed(pointer, (uint32_t)graph.bytes);
}

/* What is still there of a node's last launch becomes memory of its own. */
static void node_gone(const struct allocation *node, uint64_t launches) {
    struct target target = {.owner = context_primary(node->card), .card = node->card};
    if (node->card != NO_CARD && launches >= node->references)
        charge_commit_as(CUDA_SUCCESS, &target, node->bytes, POINTER, node->key, GRAPHED);
    else
        free_end(CUDA_SUCCESS, true, node);
}

static void unrefer(uint64_t graph) {
    struct allocation gone, node;
    unsigned shard = 0;
    if (!free_begin(GRAPH, graph, &gone))
        return;
    forget_free_nodes(graph);
    while (allocations_take_owned(&shard, graph, &node))
        node_gone(&node, gone.bytes);
}

CUresult cuGraphDestroy(CUgraph graph) {
    CUresult result = REAL(cuGraphDestroy)(graph);
    if (result == CUDA_SUCCESS)
        unrefer((uint64_t)graph);
    return result;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    struct allocation allocation;
    bool ours = free_begin(EXEC, (uint64_t)exec, &allocation);
    CUresult result = free_end(REAL(cuGraphExecDestroy)(exec), ours, &allocation);
    if (result == CUDA_SUCCESS && control_limits_compute())
        launch_cost_invalidate(launch_cost_graph_key(exec));
    if (result == CUDA_SUCCESS && ours)
        unrefer(allocation.owner);
    return result;
}
