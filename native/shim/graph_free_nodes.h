/* Nodes of graphs that free memory. */
#ifndef FENKA_GRAPH_FREE_NODES_H
#define FENKA_GRAPH_FREE_NODES_H
#include <stdint.h>

/* `capture`: 0 = the node belongs to the graph already. Without host memory for the entry, the memory stays charged. */
void free_nodes_add(uint64_t graph, uint64_t pointer, uint64_t capture);

/* Assigns a capture's nodes to the graph that it has become; 0 = drops them. */
void free_nodes_end_capture(uint64_t capture, uint64_t graph);

/* The number of nodes added so far: an executable form contains its graph's nodes below this number. */
uint64_t free_nodes_added(void);

/* Calls `freed` for each pointer that a launch frees. */
void free_nodes_run(uint64_t graph, uint64_t below, void (*freed)(uint64_t pointer));

void free_nodes_drop(uint64_t graph);

void free_nodes_reset(void); /* in a child after fork */
#endif
