#include "account_reap.h"

#include "account_lock.h"
#include "account_owner.h"
#include "account_page.h"

static void clear(uint64_t *word) {
    if (load_relaxed(word))
        store_relaxed(word, 0);
}

/* Each card's row is on another page, so words that are zero are not written: that would be 16 page faults at every
 * start. Exports are cleared first: what others hold of them may be counted twice for a moment, but is never missed. */
void account_zero_slot(unsigned slot) {
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++) {
        if (account_shares(card)) {
            clear(&account_page->exported[card][slot]);
            clear(&account_page->imported[card][slot]);
        }
        clear(&account_page->memory[card][slot]);
    }
}

/* Only the process whose identity is in the slot zeroes it, and frees it after that. */
bool account_reclaim(unsigned slot, uint64_t seen) {
    if (!account_swap_identity(slot, seen, account_identity | RECLAIMING))
        return false;
    account_zero_slot(slot);
    return account_swap_identity(slot, account_identity | RECLAIMING, 0);
}

bool account_has_exported(unsigned slot) {
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        if (account_shares(card) && load_relaxed(&account_page->exported[card][slot]))
            return true;
    return false;
}

static bool clear_all_but_exports(unsigned slot) {
    uint64_t any = 0;
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++) {
        any |= load_relaxed(&account_page->memory[card][slot]) | load_relaxed(&account_page->imported[card][slot]);
        clear(&account_page->imported[card][slot]);
        clear(&account_page->memory[card][slot]);
    }
    return any;
}

/* One swap turns the slot into one of orphans. After that any process may clear its other words. */
bool account_bury(unsigned slot, uint64_t seen) {
    if (!account_has_exported(slot))
        return account_reclaim(slot, seen);
    if (!account_swap_identity(slot, seen, (seen & ~RECLAIMING) | ORPHANED))
        return false;
    clear_all_but_exports(slot);
    return true;
}

bool account_reap_slot(unsigned slot, bool quick) {
    uint64_t seen = account_slot_identity(slot);
    if (seen & ORPHANED)
        return clear_all_but_exports(slot);
    return seen && (seen & ~RECLAIMING) != account_identity && account_owner_dead(seen, quick) &&
           !account_is_locked(seen) && account_bury(slot, seen);
}

bool account_reap_slots(bool quick) {
    bool any = false;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        any |= account_reap_slot(i, quick);
    return any;
}
