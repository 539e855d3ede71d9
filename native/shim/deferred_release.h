/* Exported blocks that this process has released while a descriptor of them is still open in some process. They stay
 * charged until the last descriptor is closed. The kernel does not report that, so the shim polls when memory is
 * requested or queried. */
#ifndef FENKA_DEFERRED_RELEASE_H
#define FENKA_DEFERRED_RELEASE_H
#include "allocations.h"

/* Adds an exported block that the driver has released. Its owner field is the first byte of its export lock. */
void deferred_add(const struct allocation *block);

/* Discharges blocks without open descriptors. True if there were any. */
bool deferred_poll_now(void);
extern uint32_t deferred_count;
static inline bool deferred_poll(void) {
    return __builtin_expect(__atomic_load_n(&deferred_count, __ATOMIC_RELAXED) != 0, 0) && deferred_poll_now();
}

void deferred_reset(void); /* in a child after fork */
#endif
