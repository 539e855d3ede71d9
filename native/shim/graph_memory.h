/* Memory that graphs allocate and free. */
#ifndef FENKA_GRAPH_MEMORY_H
#define FENKA_GRAPH_MEMORY_H
#include "charge.h"

/* Like charge and charge_commit, for memory that lasts as long as the graph and its executable forms. */
CUresult graphs_charge(const struct target *target, uint64_t bytes);
CUresult graphs_charge_commit(CUresult result, struct target *target, uint64_t bytes, CUgraph graph,
                              CUdeviceptr pointer);

/* A pointer that is not allocated otherwise was freed now. */
void graphs_memory_freed(CUdeviceptr pointer);

/* A node of the graph, or of the stream's capture (0 = none), will free the pointer. */
void graphs_add_free_node(CUgraph graph, CUdeviceptr pointer, uint64_t capture);
/* `graph`: NULL = the capture was abandoned. */
void graphs_capture_ended(uint64_t capture, CUgraph graph);

/* After the driver's call on a graph or its executable form. Without graphs that have memory these do nothing. */
void graphs_instantiated(CUgraphExec exec, CUgraph graph);
void graphs_launched(CUgraphExec exec);
void graphs_release(uint64_t graph);

void graphs_reset(void); /* in a child after fork */
#endif
