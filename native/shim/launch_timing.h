/* Measures how long single launches take, by an event before and one after. Nothing waits for the end: threads poll
 * the measurements in progress when they launch or wait. */
#ifndef FENKA_LAUNCH_TIMING_H
#define FENKA_LAUNCH_TIMING_H
#include <stdbool.h>
#include <stdint.h>

#include "cost_table.h"
#include "resolve.h"

struct launch_timing;

/* What is being measured. */
struct launch_timing_subject {
    struct cost_entry *entry;
    uint64_t key;
    uint64_t charged; /* ns, to the budget */
    uint8_t card;
    bool precharged; /* by compute_precharge, because the cost is unknown */
};

/* Records the first event. NULL if the launch cannot be measured. */
struct launch_timing *launch_timing_begin(CUstream stream, const struct launch_timing_subject *subject);

/* Records the second event after a launch with this result. False if there will be no measurement. */
bool launch_timing_end(struct launch_timing *timing, CUresult result, CUstream stream);

/* Evaluates measurements that have ended: adds their costs and corrects precharges. */
void launch_timings_poll(void);

void launch_timings_reset(void); /* in a child after fork */
#endif
