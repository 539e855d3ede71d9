/* Nodes and edges of graphs: lists, and changes of what depends on what. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    TRY(driver_ready());
    if (!type || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->work.type;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetContainingGraph(CUgraphNode node, CUgraph *graph) {
    TRY(driver_ready());
    if (!graph || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    *graph = node->graph;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetLocalId(CUgraphNode node, unsigned int *id) {
    TRY(driver_ready());
    if (!id || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    *id = node->number;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetToolsId(CUgraphNode node, unsigned long long *id) {
    TRY(driver_ready());
    if (!id || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    *id = node->id;
    return CUDA_SUCCESS;
}

CUresult cuGraphGetId(CUgraph graph, unsigned int *id) {
    TRY(driver_ready());
    if (!id || !object_get(graph, GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    *id = graph->id;
    return CUDA_SUCCESS;
}

/* ---- lists: without an array only the count is returned, and entries beyond the list are NULL ---- */

struct edge {
    CUgraphNode from, to;
    CUgraphEdgeData data;
};

static bool plain(const CUgraphEdgeData *data) {
    static const CUgraphEdgeData nothing;
    return memcmp(data, &nothing, sizeof nothing) == 0;
}

/* The older functions, which have no place for it, must not lose what an edge says. */
static CUresult lossless(const struct edge *edges, size_t count, const CUgraphEdgeData *data, const void *asked) {
    for (size_t i = 0; !data && asked && i < count; i++)
        if (!plain(&edges[i].data))
            return CUDA_ERROR_LOSSY_QUERY;
    return CUDA_SUCCESS;
}

static CUresult list_edges(const struct edge *edges, size_t count, CUgraphNode *from, CUgraphNode *to,
                           CUgraphEdgeData *data, size_t *room) {
    CUgraphNode *asked = from ? from : to;
    TRY(lossless(edges, count, data, asked));
    for (size_t i = 0; asked && i < *room; i++) {
        const struct edge shown = i < count ? edges[i] : (struct edge){0};
        if (from)
            from[i] = shown.from;
        if (to)
            to[i] = shown.to;
        if (data)
            data[i] = shown.data;
    }
    *room = !asked || count < *room ? count : *room;
    return CUDA_SUCCESS;
}

/* All edges that begin at `from` and end at `to`; NULL = at any node. The caller frees them. */
static struct edge *find_edges(CUgraph graph, CUgraphNode from, CUgraphNode to, size_t *count) {
    size_t all = 0;
    for (CUgraphNode node = graph->first; node; node = node->next)
        all += node->needs_count;
    struct edge *found = calloc(all + 1, sizeof *found);
    *count = 0;
    for (CUgraphNode node = graph->first; found && node; node = node->next)
        for (size_t i = 0; i < node->needs_count; i++)
            if ((!from || node->needs[i] == from) && (!to || node == to))
                found[(*count)++] = (struct edge){node->needs[i], node, node->edges[i]};
    return found;
}

static CUresult edges_of(CUgraph graph, CUgraphNode from, CUgraphNode to, CUgraphNode *froms, CUgraphNode *tos,
                         CUgraphEdgeData *data, size_t *room) {
    size_t count;
    struct edge *edges = find_edges(graph, from, to, &count);
    CUresult result = edges ? list_edges(edges, count, froms, tos, data, room) : CUDA_ERROR_OUT_OF_MEMORY;
    free(edges);
    return result;
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *room) {
    TRY(driver_ready());
    if (!room || !object_get(graph, GRAPH) || !from != !to)
        return CUDA_ERROR_INVALID_VALUE;
    return edges_of(graph, NULL, NULL, from, to, data, room);
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *room) {
    return cuGraphGetEdges_v2(graph, from, to, NULL, room);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *room) {
    TRY(driver_ready());
    if (!room || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    return edges_of(node->graph, NULL, node, nodes, NULL, data, room);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *room) {
    return cuGraphNodeGetDependencies_v2(node, nodes, NULL, room);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *room) {
    TRY(driver_ready());
    if (!room || !graph_node(node))
        return CUDA_ERROR_INVALID_VALUE;
    return edges_of(node->graph, node, NULL, NULL, nodes, data, room);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *room) {
    return cuGraphNodeGetDependentNodes_v2(node, nodes, NULL, room);
}

static CUresult list(CUgraph graph, CUgraphNode *nodes, size_t *room, bool roots_only) {
    TRY(driver_ready());
    if (!room || !object_get(graph, GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    size_t count = 0;
    for (CUgraphNode node = graph->first; node; node = node->next) {
        if (roots_only && node->needs_count > 0)
            continue;
        if (nodes && count < *room)
            nodes[count] = node;
        count++;
    }
    for (size_t i = count; nodes && i < *room; i++)
        nodes[i] = NULL;
    *room = !nodes || count < *room ? count : *room;
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *room) { return list(graph, nodes, room, false); }

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *room) { return list(graph, nodes, room, true); }

/* ---- changes ---- */

static bool linked(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *data) {
    for (size_t i = 0; i < to->needs_count; i++)
        if (to->needs[i] == from && (!data || memcmp(data, &to->edges[i], sizeof *data) == 0))
            return true;
    return false;
}

static CUresult pairs_fit(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    TRY(driver_ready());
    bool fit = object_get(graph, GRAPH) && graph_needs_fit(graph, from, count) && graph_needs_fit(graph, to, count);
    return fit ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *data, size_t count) {
    TRY(pairs_fit(graph, from, to, count));
    for (size_t i = 0; i < count; i++)
        if (from[i] == to[i] || linked(from[i], to[i], NULL))
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        TRY(graph_link(from[i], to[i], data ? &data[i] : NULL));
    return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    return cuGraphAddDependencies_v2(graph, from, to, NULL, count);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                      const CUgraphEdgeData *data, size_t count) {
    static const CUgraphEdgeData nothing;
    TRY(pairs_fit(graph, from, to, count));
    for (size_t i = 0; i < count; i++)
        if (!linked(from[i], to[i], data ? &data[i] : &nothing))
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        graph_unlink(from[i], to[i], data ? &data[i] : &nothing);
    return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    return cuGraphRemoveDependencies_v2(graph, from, to, NULL, count);
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags) {
    (void)flags;
    TRY(driver_ready());
    if (!object_get(graph, GRAPH) || !path)
        return CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "w");
    if (!file)
        return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(file, "digraph dot {\nsubgraph cluster_%u {\nlabel=\"graph_%u\"\n", graph->id, graph->id);
    for (CUgraphNode node = graph->first; node; node = node->next)
        fprintf(file, "\"graph_%u_node_%u\" [label=\"%u, type %d\"];\n", graph->id, node->number, node->number,
                (int)node->work.type);
    for (CUgraphNode node = graph->first; node; node = node->next)
        for (size_t i = 0; i < node->needs_count; i++)
            fprintf(file, "\"graph_%u_node_%u\" -> \"graph_%u_node_%u\";\n", graph->id, node->needs[i]->number,
                    graph->id, node->number);
    fprintf(file, "}\n}\n");
    return fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
