/* Charges each launch with its cost: measured for a sample, estimated for the others. */
#ifndef FENKA_LAUNCH_COST_H
#define FENKA_LAUNCH_COST_H
#include <stdbool.h>
#include <stdint.h>

#include "resolve.h"

struct cost_entry;
struct launch_timing;

/* A launch between launch_begin and launch_end. */
struct launch {
    struct launch_timing *timing;    /* NULL = not measured */
    struct cost_entry *unknown_cost; /* with a timing: the entry that is measured first; NULL = its cost is known */
    uint64_t cost;
    uint8_t card;
    bool charged; /* to the budget directly, instead of to the thread's sum */
};

/* The key of a kind of work: what runs and how large it is, because other sizes cost something else. */
static inline uint64_t launch_cost_key(const void *function, uint64_t a, uint64_t b) {
    uint64_t mixed = (uint64_t)function * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ a) * 0xff51afd7ed558ccdu;
    mixed = (mixed ^ mixed >> 32 ^ b) * 0xc4ceb9fe1a85ec53u;
    return (mixed ^ mixed >> 29) | 1;
}

/* A graph is measured as a whole. */
static inline uint64_t launch_cost_graph_key(CUgraphExec exec) { return launch_cost_key(exec, 0, 0); }

/* Before the driver's call: waits for the budget, and starts a measurement when one is due. */
void launch_begin(struct launch *launch, uint64_t key, CUstream stream);
/* After the driver's call. Returns its result. */
CUresult launch_end(struct launch *launch, CUresult result, CUstream stream);

void launch_cost_reset(void); /* in a child after fork */
#endif
