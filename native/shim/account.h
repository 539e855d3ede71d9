/* What the processes of the lease hold, each in its own slot; the total is the sum of the slots.
 *
 * The page is shared with programs that may write anything into it: that can give wrong sums, for as long as
 * the writer lives, but no crash and no wait. A program that makes the file shorter takes the pages away from
 * under all that have mapped it, and the kernel answers their next touch with SIGBUS. Files with a path cannot be
 * sealed against that, and looking at the size first would be a race; so a handler puts an empty page there, and
 * the program goes on with what it has, but is granted nothing more. A program that installs a handler of its own
 * afterwards, without calling the one before it, ends by it. The agent reads by pread and lives on. */
#ifndef FENKA_ACCOUNT_H
#define FENKA_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

struct fenka_compute_budget;

/* Takes a slot for this process. NULL, or a sentence's end that says what is wrong with the file. */
const char *account_open(const char *path);

/* In a child after fork: the slot is the parent's. */
void account_reset(void);

/* True when the bytes were granted: at no instant does the sum of what is granted exceed the cap. */
bool account_charge(unsigned card, uint64_t bytes);
void account_force_charge(unsigned card, uint64_t bytes); /* charged even beyond the cap: they are there */
void account_discharge(unsigned card, uint64_t bytes);

/* Counts what is handed to other processes, and what comes from them: see lease.h. An import is refused where
 * memory that others made would not fit. */
/* Of bytes that are charged: also others may hold them from now on. */
void account_export(unsigned card, uint64_t bytes);
uint64_t account_export_lock(unsigned card); /* for the descriptors of one block */
/* Exported memory is given up by its maker, and in no descriptor any more: discharged, but for what is imported. */
void account_release_exported(unsigned card, uint64_t bytes);
bool account_import(unsigned card, uint64_t bytes);
void account_unimport(unsigned card, uint64_t bytes);

/* Bytes held on the card by all processes of the lease that lived some 50 milliseconds ago. `first` is called before
 * they are judged. */
uint64_t account_used(unsigned card, void (*first)(void));

/* Takes what the dead held out of the sum now, where that is to be seen at once. */
void account_reap(unsigned card);

/* What the lease's processes spend together of a card's time; NULL in a child that has not joined. */
struct fenka_compute_budget *account_compute_budget(unsigned card);

/* Walks the processes that can be named here, in this PID namespace: the next slot at or after `slot` that
 * has one, with its PID and bytes on the card; -1 = no more. */
int account_next_process(unsigned slot, unsigned card, uint32_t *pid, uint64_t *bytes);
#endif
