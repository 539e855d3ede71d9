/* The lease's budget of a card's time, in the account that its processes share. See compute_budget.c. */
#ifndef FENKA_COMPUTE_BUDGET_H
#define FENKA_COMPUTE_BUDGET_H
#include <stdbool.h>
#include <stdint.h>

/* Takes `cost` ns of the card's time. Returns 0, or the moment (CLOCK_MONOTONIC, ns) from which it may be taken. */
uint64_t compute_budget_take(unsigned card, uint64_t cost);

/* Counts a wait for compute_budget_take by `ns`. */
void compute_budget_count_wait(unsigned card, uint64_t ns);

/* Corrects what was taken by `cost` ns, which may be negative. */
void compute_budget_adjust(unsigned card, int64_t cost);

/* Returns what a launch of unknown cost is charged in advance. A charge made only after the measurement would let a
 * program that is killed during its first launch have that for nothing. The amount doubles with each such launch until
 * compute_precharge_end. The caller takes and adjusts it. */
uint64_t compute_precharge(unsigned card);

/* Ends a precharge. `ns`: the measured cost; NULL = it could not be measured. */
void compute_precharge_end(unsigned card, const uint64_t *ns);
#endif
