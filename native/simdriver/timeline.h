/* The time line of a card. Each process has a line of its own, on which its work is done in the order of
 * launching; processes that want the card at once take turns of a slice each.
 *
 * When work will end is not known before it has ended, because others may come; so work is named by its
 * position: nanoseconds of work on the process's line since it attached. */
#ifndef FENKA_SIMULATED_TIMELINE_H
#define FENKA_SIMULATED_TIMELINE_H
#include <stdbool.h>
#include <stdint.h>

/* A place on some process's line. */
struct timeline_place {
    uint32_t card, slot;
    uint64_t generation, position;
};

/* Gives the card work of this duration; returns the position of its end. Returns at once. */
uint64_t timeline_add(uint32_t card, uint64_t duration_ns);
struct timeline_place timeline_own(uint32_t card, uint64_t position);
/* Whether the work before it is done; a process's work counts as done when the process has ended. */
bool timeline_reached(struct timeline_place place);
/* Sleeps until then. */
void timeline_wait(struct timeline_place place);
/* When a position of this process was reached that has been reached. Exact for the last 64 turns,
 * estimated for what was before them. */
uint64_t timeline_time_of(uint32_t card, uint64_t position);
/* Nanoseconds in which the card was busy during the last second. */
uint64_t timeline_card_busy(uint32_t card);
/* The same for one process. */
uint64_t timeline_process_busy(uint32_t card, uint32_t slot);
/* What it has had since its slot was taken. */
uint64_t timeline_process_total(uint32_t card, uint32_t slot);
/* Records what the process in the slot has had until now. For the server: the process has ended. */
void timeline_settle(uint32_t card, uint32_t slot);
void timeline_after_fork(void);
#endif
