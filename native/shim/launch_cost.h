/* What launches cost: measured of some, estimated of the others. */
#ifndef FENKA_KERNELS_H
#define FENKA_KERNELS_H
#include <stdbool.h>
#include <stdint.h>

#include "resolve.h"

struct launch_timing;

/* One launch on its way. */
struct launch {
    struct launch_timing *measure; /* NULL = not measured */
    uint64_t cost;
    uint8_t card;
    bool charged;
};

/* Before the driver is asked: waits for the lease's turn, and begins to measure where that is due. `work` names
 * what is launched, with its size; the same work is taken to cost the same. */
void launch_begin(struct launch *launch, uint64_t work, CUstream stream);
/* After the driver's answer, which is given back. */
CUresult launch_end(struct launch *launch, CUresult result, CUstream stream);

/* Work of this name costs something else from now on. */
void launch_cost_invalidate(uint64_t work);
/* Looks whether something that is measured has ended. */
void launch_timings_poll(void);
void launch_cost_reset(void); /* in a child after fork */
#endif
