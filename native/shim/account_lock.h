/* The lock that shows whether a process, or a child that inherited its descriptors, has the driver open: see lease.h. */
#ifndef FENKA_ACCOUNT_LOCK_H
#define FENKA_ACCOUNT_LOCK_H
#include <stdbool.h>
#include <stdint.h>

/* Sets this process's lock. False if the account cannot be locked. */
bool account_lock_set(void);

/* Whether the owner of a slot, or a process that inherited its descriptors, has the driver open. True if that is unknown;
 * false if the slot is being reclaimed, because that has been answered. */
bool account_is_locked(uint64_t identity);

void account_lock_reset(void); /* in a child after fork: the lock is the parent's, and stays */
#endif
