/* Delays launches until the lease may use more of the card's time. */
#ifndef FENKA_THROTTLE_H
#define FENKA_THROTTLE_H
#include <stdint.h>

/* Waits until the budget allows it, and takes `cost` ns of the card's time. */
void throttle_wait(unsigned card, uint64_t cost);
#endif
