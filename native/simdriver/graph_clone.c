/* Copies of graphs: a clone, a child node's graph, and what an executable graph runs. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static bool clone_bodies(struct graph_work *work) {
    CUgraph *theirs = work->condition.bodies;
    CUgraph *bodies = calloc(work->condition.size + 1, sizeof *bodies);
    bool whole = bodies;
    work->condition.bodies = bodies;
    for (unsigned i = 0; whole && i < work->condition.size; i++) {
        bodies[i] = graph_clone(theirs[i]);
        whole = bodies[i];
        if (whole)
            bodies[i]->inner = true;
    }
    return whole;
}

/* What the copy of a node holds of its own. False without memory; then the work holds nothing. */
static bool hold(struct graph_work *work) {
    bool held = true;
    if (work->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        graph_memory_hold(work->taken.memory, 1);
    } else if (work->type == CU_GRAPH_NODE_TYPE_GRAPH) {
        work->child = graph_clone(work->child);
        held = work->child;
        if (held)
            work->child->inner = true;
    } else if (work->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        held = clone_bodies(work);
    }
    if (!held) {
        graph_work_release(work);
        work->type = CU_GRAPH_NODE_TYPE_EMPTY;
    }
    return held;
}

static bool clone_node(CUgraph copy, CUgraphNode node) {
    struct graph_work work = node->work;
    if (!hold(&work))
        return false;
    if (work.type == CU_GRAPH_NODE_TYPE_KERNEL && !object_get(work.kernel.func, FUNCTION)) {
        graph_work_release(&work);
        return false; /* its module was unloaded */
    }
    if (graph_add(copy, NULL, 0, &work, &node->twin) != CUDA_SUCCESS) {
        graph_work_release(&work);
        return false;
    }
    node->twin->origin = node->id;
    node->twin->context = node->context;
    node->twin->disabled = node->disabled;
    if (!node->launch)
        return true;
    node->twin->launch = calloc(CU_LAUNCH_ATTRIBUTE_MAX, sizeof *node->launch);
    if (node->twin->launch)
        memcpy(node->twin->launch, node->launch, CU_LAUNCH_ATTRIBUTE_MAX * sizeof *node->launch);
    return node->twin->launch;
}

static bool clone_into(CUgraph copy, CUgraph graph) {
    for (CUgraphNode node = graph->first; node; node = node->next)
        if (!clone_node(copy, node))
            return false;
    for (CUgraphNode node = graph->first; node; node = node->next)
        for (size_t i = 0; i < node->needs_count; i++)
            if (graph_link(node->needs[i]->twin, node->twin, &node->edges[i]) != CUDA_SUCCESS)
                return false;
    return graph_conditions_copy(graph, copy) && graph_users_copy(graph, copy);
}

CUgraph graph_clone(CUgraph graph) {
    CUgraph copy = graph_new();
    if (copy && !clone_into(copy, graph)) {
        graph_delete(copy);
        return NULL;
    }
    return copy;
}

CUgraphNode graph_find(CUgraph copy, CUgraphNode original) {
    for (CUgraphNode node = copy->first; node; node = node->next) {
        CUgraphNode inside = NULL;
        if (node->origin == original->id)
            return node;
        if (node->work.type == CU_GRAPH_NODE_TYPE_GRAPH)
            inside = graph_find(node->work.child, original);
        for (unsigned i = 0; node->work.type == CU_GRAPH_NODE_TYPE_CONDITIONAL && i < node->work.condition.size; i++)
            if (!inside)
                inside = graph_find(node->work.condition.bodies[i], original);
        if (inside)
            return inside;
    }
    return NULL;
}

CUresult cuGraphClone(CUgraph *out, CUgraph graph) {
    TRY(driver_ready());
    if (!out || !object_get(graph, GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    if (graph_has(graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC) || graph_has(graph, CU_GRAPH_NODE_TYPE_MEM_FREE))
        return CUDA_ERROR_NOT_SUPPORTED; /* each address belongs to one graph */
    *out = graph_clone(graph);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph copy) {
    TRY(driver_ready());
    if (!out || !graph_node(original) || !object_get(copy, GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph_find(copy, original);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
