/* Memory nodes of graphs, added one by one or by capturing a stream.
 *
 * The device keeps a graph's memory between launches, so it stays charged until the graph and its executable forms are
 * destroyed. The driver allows one executable form at a time, and neither clones nor removes such nodes: a reference
 * count per graph is enough.
 *
 * Memory that a launch allocated and nothing freed outlives the graph and becomes an ordinary allocation. The program
 * may free it after the launch; so may a node, when an executable form of any graph with that node is launched. */
#include "graph_memory.h"

#include "context_state.h"
#include "graph_free_nodes.h"
#include "pools.h"

static bool any; /* a graph with memory was ever created: until then launches and frees need no lookup */

void graphs_reset(void) { free_nodes_reset(); }

static void add_graph(uint64_t graph) {
    struct allocation old, new = {.key = graph, .references = 1, .kind = GRAPH, .card = NO_CARD};
    if (!allocations_find(GRAPH, graph, &old))
        allocations_put(new, &old);
    __atomic_store_n(&any, true, __ATOMIC_RELAXED);
}

CUresult graphs_charge(const struct target *target, uint64_t bytes) {
    CUresult result = charge(target, 0);
    return result || target->card == NO_CARD ? result : pools_graph_add(target->card, bytes);
}

CUresult graphs_charge_commit(CUresult result, struct target *target, uint64_t bytes, CUgraph graph,
                              CUdeviceptr pointer) {
    if (result != CUDA_SUCCESS) {
        if (target->card != NO_CARD)
            pools_graph_remove(target->card, bytes);
        return result;
    }
    add_graph((uint64_t)graph);
    target->owner = (uint64_t)graph;
    return charge_commit(result, target, bytes, NODE, pointer);
}

void graphs_add_free_node(CUgraph graph, CUdeviceptr pointer, uint64_t capture) {
    add_graph((uint64_t)graph);
    free_nodes_add((uint64_t)graph, pointer, capture);
}

void graphs_capture_ended(uint64_t capture, CUgraph graph) { free_nodes_end_capture(capture, (uint64_t)graph); }

static void memory_freed(uint64_t pointer) {
    struct allocation node, graph;
    if (allocations_find(NODE, pointer, &node) && allocations_find(GRAPH, node.owner, &graph))
        allocations_node_freed(pointer, (uint32_t)graph.bytes);
}

void graphs_memory_freed(CUdeviceptr pointer) {
    if (__atomic_load_n(&any, __ATOMIC_RELAXED))
        memory_freed(pointer);
}

/* The executable form's `bytes` is the number of the first free node that is not in it. */
void graphs_instantiated(CUgraphExec exec, CUgraph graph) {
    struct allocation old, new = {.owner = (uint64_t)graph, .references = 1, .kind = EXEC, .card = NO_CARD};
    if (!allocations_retain(GRAPH, (uint64_t)graph))
        return;
    new.key = (uint64_t)exec;
    new.bytes = free_nodes_added();
    allocations_put(new, &old);
}

void graphs_launched(CUgraphExec exec) {
    struct allocation form;
    if (__builtin_expect(__atomic_load_n(&any, __ATOMIC_RELAXED), 0) && allocations_find(EXEC, (uint64_t)exec, &form)) {
        allocations_count_launch(form.owner);
        pools_graph_launched();
        free_nodes_run(form.owner, form.bytes, memory_freed);
    }
}

/* Memory of the last launch that was not freed becomes an allocation of its own. */
static void release_node(const struct allocation *node, uint64_t launches) {
    if (node->card == NO_CARD || launches < node->references) {
        discharge_allocation(node);
        return;
    }
    struct target target = {.owner = context_primary(node->card), .card = node->card};
    charge_commit_as(CUDA_SUCCESS, &target, node->bytes, POINTER, node->key, FROM_GRAPH);
}

void graphs_release(uint64_t graph) {
    struct allocation released, node;
    unsigned shard = 0;
    if (!allocations_release(GRAPH, graph, &released))
        return;
    free_nodes_drop(graph);
    while (allocations_take_owned(&shard, graph, &node))
        release_node(&node, released.bytes);
}
