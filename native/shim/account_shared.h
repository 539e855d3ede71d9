/* The part of the account that concerns memory shared between processes: see lease.h. */
#ifndef FENKA_ACCOUNT_SHARED_H
#define FENKA_ACCOUNT_SHARED_H
#include <stdbool.h>
#include <stdint.h>

#include "account_page.h"

/* Bytes that are charged to nobody's `memory` but held: `released`, orphans' exports, and imports from other leases. */
uint64_t account_shared_bytes(unsigned card);

/* Bytes held on the card by the lease. Plain loads, because atomic ones would not be vectorised: an aligned word is
 * read whole on every machine that this is built for, and the caller's fence makes it recent enough. */
__attribute__((no_sanitize("thread"))) static inline uint64_t account_total(unsigned card) {
    const uint64_t *held = account_page->memory[card];
    uint64_t total = 0;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        total += held[i];
    return account_shares(card) ? total + account_shared_bytes(card) : total;
}

/* Frees what dead processes hold on the card. True if there was any. */
bool account_reap_card(unsigned card);

/* The same on all cards, including slots that hold nothing. */
bool account_reap_everything(void);
#endif
