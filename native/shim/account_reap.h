/* Frees the slots of dead processes. */
#ifndef FENKA_ACCOUNT_REAP_H
#define FENKA_ACCOUNT_REAP_H
#include <stdbool.h>
#include <stdint.h>

/* Zeroes a slot whose identity is still `seen`, and frees it. True if this process did so. */
bool account_reclaim(unsigned slot, uint64_t seen);

/* Takes over a dead owner's slot: frees it, or orphans what it exported. True if this process did so. */
bool account_bury(unsigned slot, uint64_t seen);

/* Frees what a slot of a dead owner, or of orphans, still holds. True if there was any. */
bool account_reap_slot(unsigned slot, bool quick);
bool account_reap_slots(bool quick);

bool account_has_exported(unsigned slot);
void account_zero_slot(unsigned slot);
#endif
