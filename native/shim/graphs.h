/* Memory that belongs to a graph. */
#ifndef FENKA_GRAPHS_H
#define FENKA_GRAPHS_H
#include "charge.h"

/* As `settle`, for memory that lasts as long as the graph and what was instantiated from it. */
CUresult graphs_settle(CUresult result, struct place *place, uint64_t bytes, CUgraph graph, CUdeviceptr pointer);
#endif
