/* Graphs as data: nodes and what they depend on. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

CUgraph graph_new(void) { return object_new(GRAPH, sizeof(struct CUgraph_st), NULL); }

void graph_delete(CUgraph graph) {
    for (CUgraphNode node = graph->first, next; node; node = next) {
        next = node->next;
        if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            graph_memory_hold(node->work.taken.memory, -1);
        free(node->needs);
        object_delete(node);
    }
    object_delete(graph);
}

bool graph_needs_fit(CUgraph graph, const CUgraphNode *needs, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!object_get(needs[i], NODE) || needs[i]->graph != graph)
            return false;
    return count == 0 || needs;
}

CUresult graph_add(CUgraph graph, const CUgraphNode *needs, size_t count, const struct graph_work *work,
                   CUgraphNode *out) {
    if (!object_get(graph, GRAPH) || !graph_needs_fit(graph, needs, count))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode node = object_new(NODE, sizeof *node, NULL);
    CUgraphNode *copy = count ? calloc(count, sizeof *copy) : NULL;
    if (!node || (count && !copy)) {
        if (node)
            object_delete(node);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (count)
        memcpy(copy, needs, count * sizeof *copy);
    node->graph = graph;
    node->work = *work;
    node->needs = copy;
    node->needs_count = count;
    if (graph->last)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->count++;
    if (out)
        *out = node;
    return CUDA_SUCCESS;
}
