/* Memory that belongs to a graph. */
#ifndef FENKA_GRAPHS_H
#define FENKA_GRAPHS_H
#include "charge.h"

/* As `settle`, for memory that lasts as long as the graph and what was instantiated from it. */
/* A pointer that is not held otherwise was freed: on a stream that is being captured into a graph, or at once. */
void graphs_freed(CUdeviceptr pointer, CUgraph captured);

CUresult graphs_settle(CUresult result, struct place *place, uint64_t bytes, CUgraph graph, CUdeviceptr pointer);
#endif
