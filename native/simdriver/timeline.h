/* The time line of a card: one kernel after another, whoever launched it. */
#ifndef FENKA_SIMULATED_TIMELINE_H
#define FENKA_SIMULATED_TIMELINE_H
#include <stdint.h>

/* Gives the card a kernel of this duration that may not start before `earliest_ns`; returns when it
 * will end. Returns at once. */
uint64_t timeline_add(uint32_t card, uint64_t earliest_ns, uint64_t duration_ns);
/* Sleeps until then. */
void timeline_wait(uint64_t until_ns);
/* Nanoseconds in which the card was busy during the last second. */
uint64_t timeline_card_busy(uint32_t card);
/* The same for one process. */
uint64_t timeline_process_busy(uint32_t card, uint32_t slot);
#endif
