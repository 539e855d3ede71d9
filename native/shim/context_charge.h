/* What contexts cost, and code that is loaded into all of them. A process is charged for its first context on a card;
 * later ones are small in comparison. */
#ifndef FENKA_CONTEXT_CHARGE_H
#define FENKA_CONTEXT_CHARGE_H
#include <stdint.h>

#include "target.h"

/* Around the creation of a context: charges the first one on the device's card. Sets the target. */
CUresult context_charge(CUdevice device, struct target *target);
void context_discharge(unsigned card);

/* Code for every context of this process, including later ones: all of it, or out of memory. */
CUresult context_charge_code(uint64_t bytes);
void context_discharge_code(uint64_t bytes);

void context_charge_reset(void); /* in a child after fork */
#endif
