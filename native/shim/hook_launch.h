/* What graphs.c needs of launches.c. */
#ifndef FENKA_LAUNCHES_H
#define FENKA_LAUNCHES_H
#include <stdint.h>

#include "resolve.h"

/* Names the work of a graph. */
uint64_t launch_cost_graph_key(CUgraphExec exec);
#endif
