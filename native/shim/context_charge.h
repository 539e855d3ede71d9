/* What contexts cost, and code that is loaded into all of them. A process is charged for its first context on a card;
 * later ones are small in comparison. */
#ifndef FENKA_CONTEXT_CHARGE_H
#define FENKA_CONTEXT_CHARGE_H
#include <stdbool.h>
#include <stdint.h>

#include "fenka/lease.h"
#include "target.h"

/* Around the creation of a context: charges the first one on the device's card. Sets the target. */
CUresult context_charge(CUdevice device, struct target *target);
void context_discharge(unsigned card);

/* Code for every context of this process, including later ones: all of it, or out of memory. */
CUresult context_charge_code(uint64_t bytes);
void context_discharge_code(uint64_t bytes);

/* A context may come from a private table of the driver, as the CUDA runtime's do. The first charge on a card without a
 * charged context looks for one: the primary one, if it is active, or the calling thread's. It is charged even beyond the
 * cap, because it exists. */
extern uint8_t contexts_charged[FENKA_MAX_CARDS];
static inline bool context_is_charged(unsigned card) {
    return __builtin_expect(__atomic_load_n(&contexts_charged[card], __ATOMIC_RELAXED), 1);
}
void context_adopt(unsigned card);
/* Whether an adopted primary context has ended unseen. Its memory is discharged. */
bool contexts_poll(unsigned card);

void context_charge_reset(void); /* in a child after fork */
#endif
