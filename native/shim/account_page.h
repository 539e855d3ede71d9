/* The account's page and this process's place in it. For the account's own files. */
#ifndef FENKA_ACCOUNT_PAGE_H
#define FENKA_ACCOUNT_PAGE_H
#include <stdbool.h>
#include <stdint.h>

#include "atomics.h"
#include "fenka/lease.h"

#define RECLAIMING ((uint64_t)1 << FENKA_IDENTITY_RECLAIMING)
#define ORPHANED ((uint64_t)1 << FENKA_IDENTITY_ORPHANED)
#define PID_MASK (((uint64_t)1 << FENKA_IDENTITY_RECLAIMING) - 1)
#define START_MASK (((uint64_t)1 << (64 - FENKA_IDENTITY_START)) - 1)
#define NO_SLOT UINT32_MAX

#pragma GCC visibility push(hidden)
extern struct fenka_account *account_page;
extern char account_path[4096];
extern uint64_t account_identity; /* of this process */
extern uint32_t account_slot;     /* its slot, or NO_SLOT */
#pragma GCC visibility pop

/* Maps the file. NULL, or the end of a sentence that says what is wrong with it. */
const char *account_page_open(const char *path);

/* Whether another process has truncated the file. */
bool account_page_lost(void);

/* Slots up to the high-water mark, rounded up for the vector unit; the ones above the mark are zero. */
static inline unsigned account_slots(void) {
    uint64_t used = load_relaxed(&account_page->slots_used);
    return used < FENKA_MAX_SLOTS ? ((unsigned)used + 7) & ~7u : FENKA_MAX_SLOTS;
}

/* Whether anything on the card was ever exported or imported. */
static inline bool account_shares(unsigned card) {
    return __builtin_expect(load_relaxed(&account_page->shared_cards) >> card & 1, 0);
}

static inline bool account_is_orphaned(unsigned slot) { return load_relaxed(&account_page->identity[slot]) & ORPHANED; }

static inline uint64_t account_slot_identity(unsigned slot) {
    return __atomic_load_n(&account_page->identity[slot], __ATOMIC_ACQUIRE);
}

static inline bool account_swap_identity(unsigned slot, uint64_t seen, uint64_t next) {
    return __atomic_compare_exchange_n(&account_page->identity[slot], &seen, next, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

/* A request of the program was refused because it did not fit. Only the agent reads the counts. */
static inline void account_count_refusal(unsigned card) {
    if (!account_page)
        return;
    __atomic_fetch_add(&account_page->refused, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&account_page->compute_budgets[card].out_of_memory, 1, __ATOMIC_RELAXED);
}

/* Never below zero: another program may have written into the slot, and an underflow would fill the card. */
static inline void account_subtract(uint64_t *word, uint64_t bytes) {
    uint64_t seen = load_relaxed(word);
    while (!__atomic_compare_exchange_n(word, &seen, seen > bytes ? seen - bytes : 0, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
        ;
}
#endif
