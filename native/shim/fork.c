/* A child after fork shares the parent's mappings but owns nothing in them, so it starts without a lease. */
#include <stddef.h>

#include "account.h"
#include "allocations.h"
#include "context_charge.h"
#include "context_state.h"
#include "cost_table.h"
#include "deferred_release.h"
#include "graph_memory.h"
#include "launch_cost.h"
#include "launch_timing.h"
#include "lease.h"
#include "pools.h"

static void reset_in_child(void) {
    lease_reset();
    init_reset();
    account_reset();
    allocations_reset();
    context_state_reset();
    context_charge_reset();
    cost_table_reset();
    launch_timings_reset();
    launch_cost_reset();
    deferred_reset();
    pools_reset();
    graphs_reset();
}

/* glibc has the first (its pthread_atfork is linked statically), musl has the second. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern int pthread_atfork(void (*)(void), void (*)(void), void (*)(void)) __attribute__((weak));

__attribute__((constructor)) static void register_handler(void) {
    if (__register_atfork)
        __register_atfork(NULL, NULL, reset_in_child, NULL);
    else if (pthread_atfork)
        pthread_atfork(NULL, NULL, reset_in_child);
}
