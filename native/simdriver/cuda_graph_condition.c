/* Conditional nodes. A kernel would set a handle's value; simulated kernels compute nothing, so it stays the default. */
#include <stdlib.h>

#include "graph.h"

struct graph_condition {
    CUgraphConditionalHandle handle;
    unsigned value;
    struct graph_condition *next;
};

static CUgraphConditionalHandle last_handle;

static struct graph_condition *condition(CUgraph graph, CUgraphConditionalHandle handle) {
    struct graph_condition *found = graph->conditions;
    while (found && found->handle != handle)
        found = found->next;
    return found;
}

static bool add(CUgraph graph, CUgraphConditionalHandle handle, unsigned value) {
    struct graph_condition *made = malloc(sizeof *made);
    if (!made)
        return false;
    *made = (struct graph_condition){handle, value, graph->conditions};
    graph->conditions = made;
    return true;
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *out, CUgraph graph, CUcontext context,
                                        unsigned int value, unsigned int flags) {
    TRY(driver_ready());
    if (!out || !object_get(graph, GRAPH) || (context && !context_valid(context)) ||
        flags & ~(unsigned)CU_GRAPH_COND_ASSIGN_DEFAULT)
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphConditionalHandle handle = __atomic_add_fetch(&last_handle, 1, __ATOMIC_RELAXED);
    if (!add(graph, handle, flags & CU_GRAPH_COND_ASSIGN_DEFAULT ? value : 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = handle;
    return CUDA_SUCCESS;
}

bool graph_condition_known(CUgraph graph, CUgraphConditionalHandle handle) { return condition(graph, handle); }

unsigned graph_condition_value(CUgraph graph, CUgraphConditionalHandle handle) {
    const struct graph_condition *found = condition(graph, handle);
    return found ? found->value : 0;
}

bool graph_conditions_copy(CUgraph from, CUgraph to) {
    for (const struct graph_condition *held = from->conditions; held; held = held->next)
        if (!add(to, held->handle, held->value))
            return false;
    return true;
}

void graph_conditions_free(CUgraph graph) {
    for (struct graph_condition *held = graph->conditions, *next; held; held = next) {
        next = held->next;
        free(held);
    }
    graph->conditions = NULL;
}
