/* Memory that belongs to a graph. */
#ifndef FENKA_GRAPHS_H
#define FENKA_GRAPHS_H
#include "charge.h"

/* As `settle`, for memory that lasts as long as the graph and what was instantiated from it. */
CUresult graphs_charge_commit(CUresult result, struct target *target, uint64_t bytes, CUgraph graph, CUdeviceptr pointer);

/* A pointer that is not held otherwise was freed now; or will be by a node of this graph. */
void graphs_memory_freed(CUdeviceptr pointer);
void graphs_add_free_node(CUgraph graph, CUdeviceptr pointer, uint64_t capture); /* 0 = it is no capture */
void graphs_capture_ended(uint64_t capture, CUgraph graph); /* NULL = nothing has become of it */
void graphs_reset(void); /* in a child after fork */
#endif
