/* Blocks that this process has given up while a descriptor of them was still open somewhere. They stay charged
 * until it is closed, which nobody tells: so it is looked for when memory is wanted or asked after. */
#ifndef FENKA_LATE_H
#define FENKA_LATE_H
#include "holdings.h"

/* An exported block that the driver has released; its owner is its mark. */
void late_give_up(const struct holding *block);
/* True when some were charged that are gone now. */
bool late_look_now(void);
extern uint32_t late_waiting;
static inline bool late_look(void) {
    return __builtin_expect(__atomic_load_n(&late_waiting, __ATOMIC_RELAXED) != 0, 0) && late_look_now();
}
void late_forget(void); /* in a child after fork */
#endif
