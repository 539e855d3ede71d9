/* The memory that the lease's processes hold, each in its own slot; the total is the sum of the slots.
 *
 * The programs that share the page may write anything into it. That can falsify sums while the writer lives, but cannot
 * crash or block other programs. A program that truncates the file removes the pages from all mappings; the kernel
 * answers the next access with SIGBUS. Files with a path cannot be sealed against that, and checking the size first
 * would be a race. So a signal handler maps an empty page there; the program keeps what it has, and is granted nothing
 * more. A program that installs its own handler later, without calling the previous one, is killed by the signal. The
 * agent reads by pread and is not affected. */
#ifndef FENKA_ACCOUNT_H
#define FENKA_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

struct fenka_compute_budget;

/* Takes a slot for this process. NULL, or the end of a sentence that says what is wrong with the file. */
const char *account_open(const char *path);

void account_reset(void); /* in a child after fork: the slot is the parent's */

/* True if the bytes were granted. The sum of all granted bytes never exceeds the cap. */
bool account_charge(unsigned card, uint64_t bytes);
void account_force_charge(unsigned card, uint64_t bytes); /* also beyond the cap: the memory exists */
void account_discharge(unsigned card, uint64_t bytes);

/* Charged bytes that other processes may hold as well from now on. */
void account_export(unsigned card, uint64_t bytes);
/* A new first byte for the export lock of a block's descriptors. */
uint64_t account_export_lock(unsigned card);
/* This process has released exported bytes that are in no open descriptor: discharges what is not imported. */
void account_release_exported(unsigned card, uint64_t bytes);
/* Bytes that another process exported. False if memory from another lease would not fit. */
bool account_import(unsigned card, uint64_t bytes);
void account_unimport(unsigned card, uint64_t bytes);

/* Bytes held on the card by the lease's processes that were alive within the last 50 ms. `before_reap` is called before
 * dead processes are looked for. */
uint64_t account_used(unsigned card, void (*before_reap)(void));

/* Removes what dead processes hold from the total now. */
void account_reap(unsigned card);

/* The lease's budget of the card's time; NULL in a child that has not joined the lease. */
struct fenka_compute_budget *account_compute_budget(unsigned card);

/* Iterates over the processes of this PID namespace: returns the next slot at or after `slot`, with the PID and the
 * bytes on the card; -1 = no more. */
int account_next_process(unsigned slot, unsigned card, uint32_t *pid, uint64_t *bytes);
#endif
