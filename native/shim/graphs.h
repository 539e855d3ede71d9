/* Memory that belongs to a graph. */
#ifndef FENKA_GRAPHS_H
#define FENKA_GRAPHS_H
#include "charge.h"

/* As `settle`, for memory that lasts as long as the graph and what was instantiated from it. */
CUresult graphs_settle(CUresult result, struct place *place, uint64_t bytes, CUgraph graph, CUdeviceptr pointer);

/* A pointer that is not held otherwise was freed now; or will be by a node of this graph. */
void graphs_freed(CUdeviceptr pointer);
void graphs_frees(CUgraph graph, CUdeviceptr pointer, uint64_t capture); /* 0 = it is no capture */
void graphs_captured(uint64_t capture, CUgraph graph); /* NULL = nothing has become of it */
void graphs_forget(void); /* in a child after fork */
#endif
