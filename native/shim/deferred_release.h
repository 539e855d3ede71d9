/* Blocks that this process has given up while a descriptor of them was still open somewhere. They stay charged
 * until it is closed, which nobody tells: so it is looked for when memory is wanted or asked after. */
#ifndef FENKA_LATE_H
#define FENKA_LATE_H
#include "allocations.h"

/* An exported block that the driver has released; its owner is its mark. */
void deferred_add(const struct allocation *block);
/* True when some were charged that are gone now. */
bool deferred_poll_now(void);
extern uint32_t deferred_count;
static inline bool deferred_poll(void) {
    return __builtin_expect(__atomic_load_n(&deferred_count, __ATOMIC_RELAXED) != 0, 0) && deferred_poll_now();
}
void deferred_reset(void); /* in a child after fork */
#endif
