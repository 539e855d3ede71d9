/* Graphs as data: nodes and what they depend on. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"
#include "image_size.h"

static uint64_t last_node;
static unsigned last_graph;

CUgraph graph_new(void) {
    CUgraph graph = object_new(GRAPH, sizeof(struct CUgraph_st), NULL);
    if (graph)
        graph->id = __atomic_add_fetch(&last_graph, 1, __ATOMIC_RELAXED);
    return graph;
}

CUgraphNode graph_node(CUgraphNode node) { return object_get(node, NODE); }

void graph_work_release(const struct graph_work *work) {
    switch ((int)work->type) {
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        graph_memory_hold(work->taken.memory, -1);
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        if (work->child)
            graph_delete(work->child);
        break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        for (unsigned i = 0; work->condition.bodies && i < work->condition.size; i++)
            if (work->condition.bodies[i])
                graph_delete(work->condition.bodies[i]);
        free(work->condition.bodies);
        break;
    default:
        break;
    }
}

static void node_delete(CUgraphNode node) {
    graph_work_release(&node->work);
    free(node->arguments);
    free(node->needs);
    free(node->edges);
    free(node->launch);
    object_delete(node);
}

void graph_delete(CUgraph graph) {
    for (CUgraphNode node = graph->first, next; node; node = next) {
        next = node->next;
        node_delete(node);
    }
    graph->first = graph->last = NULL;
    graph->count = 0;
    graph_users_release(graph);
    graph_conditions_free(graph);
    object_delete(graph);
}

void graph_remove(CUgraphNode node) {
    CUgraph graph = node->graph;
    CUgraphNode before = NULL;
    for (CUgraphNode other = graph->first; other; other = other->next) {
        while (graph_unlink(node, other, NULL))
            ;
        if (other->next == node)
            before = other;
    }
    *(before ? &before->next : &graph->first) = node->next;
    if (graph->last == node)
        graph->last = before;
    graph->count--;
    node_delete(node);
}

bool graph_needs_fit(CUgraph graph, const CUgraphNode *needs, size_t count) {
    for (size_t i = 0; needs && i < count; i++)
        if (!object_get(needs[i], NODE) || needs[i]->graph != graph)
            return false;
    return count == 0 || needs;
}

CUresult graph_link(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *edge) {
    CUgraphNode *needs = realloc(to->needs, (to->needs_count + 1) * sizeof *needs);
    to->needs = needs ? needs : to->needs;
    CUgraphEdgeData *edges = realloc(to->edges, (to->needs_count + 1) * sizeof *edges);
    to->edges = edges ? edges : to->edges;
    if (!needs || !edges)
        return CUDA_ERROR_OUT_OF_MEMORY;
    needs[to->needs_count] = from;
    edges[to->needs_count++] = edge ? *edge : (CUgraphEdgeData){0};
    return CUDA_SUCCESS;
}

bool graph_unlink(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *edge) {
    for (size_t i = 0; i < to->needs_count; i++) {
        if (to->needs[i] != from || (edge && memcmp(edge, &to->edges[i], sizeof *edge) != 0))
            continue;
        to->needs_count--;
        memmove(to->needs + i, to->needs + i + 1, (to->needs_count - i) * sizeof *to->needs);
        memmove(to->edges + i, to->edges + i + 1, (to->needs_count - i) * sizeof *to->edges);
        return true;
    }
    return false;
}

/* The arguments are the program's, which may free them after the call. */
CUresult graph_copy_arguments(CUgraphNode node) {
    CUDA_KERNEL_NODE_PARAMS *kernel = &node->work.kernel;
    size_t count = 0, total = 0;
    struct CUfunc_st *function;
    void **given = kernel->kernelParams;
    TRY(function_resolve(kernel->func, &function));
    free(node->arguments);
    node->arguments = NULL;
    kernel->kernelParams = NULL;
    kernel->extra = NULL;
    if (!given || !function->arguments)
        return CUDA_SUCCESS;
    for (; count < function->arguments->count; count++)
        total += (function->arguments->each[count].size + 15) / 16 * 16;
    void **copy = calloc(1, (count + 2) / 2 * 16 + total);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *to = (char *)copy + (count + 2) / 2 * 16;
    for (size_t i = 0; i < count; i++) {
        size_t size = function->arguments->each[i].size;
        copy[i] = to;
        if (given[i])
            memcpy(to, given[i], size);
        to += (size + 15) / 16 * 16;
    }
    node->arguments = copy;
    kernel->kernelParams = count ? copy : NULL;
    return CUDA_SUCCESS;
}

void graph_set_work(CUgraphNode node, const struct graph_work *work) {
    graph_work_release(&node->work);
    node->work = *work;
}

static CUresult link_all(CUgraphNode node, const CUgraphNode *needs, size_t count) {
    for (size_t i = 0; i < count; i++)
        TRY(graph_link(needs[i], node, NULL));
    return node->work.type == CU_GRAPH_NODE_TYPE_KERNEL ? graph_copy_arguments(node) : CUDA_SUCCESS;
}

CUresult graph_add(CUgraph graph, const CUgraphNode *needs, size_t count, const struct graph_work *work,
                   CUgraphNode *out) {
    if (!object_get(graph, GRAPH) || !graph_needs_fit(graph, needs, count))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode node = object_new(NODE, sizeof *node, NULL);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->graph = graph;
    node->work = *work;
    CUresult result = link_all(node, needs, count);
    if (result != CUDA_SUCCESS) {
        node->work.type = CU_GRAPH_NODE_TYPE_EMPTY; /* the caller keeps the work */
        node_delete(node);
        return result;
    }
    node->number = graph->nodes_made++;
    node->id = __atomic_add_fetch(&last_node, 1, __ATOMIC_RELAXED);
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

bool graph_has(CUgraph graph, CUgraphNodeType type) {
    for (CUgraphNode node = graph->first; node; node = node->next) {
        if (node->work.type == type)
            return true;
        if (node->work.type == CU_GRAPH_NODE_TYPE_GRAPH && graph_has(node->work.child, type))
            return true;
        for (unsigned i = 0; node->work.type == CU_GRAPH_NODE_TYPE_CONDITIONAL && i < node->work.condition.size; i++)
            if (graph_has(node->work.condition.bodies[i], type))
                return true;
    }
    return false;
}
