#include "account_shared.h"

#include "account.h"
#include "account_reap.h"
#include "control.h"
#include "export_locks.h"
#include "os.h"

#define LEASE_BITS 20
#define OWNER_BITS 20

__attribute__((noinline, cold)) uint64_t account_shared_bytes(unsigned card) {
    uint64_t released = load_relaxed(&account_page->released[card]), orphaned = 0, shared = released, foreign = 0;
    for (unsigned i = 0, n = account_slots(); i < n; i++) {
        uint64_t exported = load_relaxed(&account_page->exported[card][i]);
        shared += exported;
        if (exported && account_is_orphaned(i))
            orphaned += exported;
    }
    for (unsigned i = 0, n = account_slots(); i < n; i++) {
        uint64_t imported = load_relaxed(&account_page->imported[card][i]);
        foreign += imported > shared ? imported - shared : 0;
    }
    return released + orphaned + foreign;
}

/* ---- export locks ---- */

static uint64_t owner_bits(uint64_t identity) {
    return (identity & ~(RECLAIMING | ORPHANED)) * 0x9e3779b97f4a7c15u >> (64 - OWNER_BITS);
}

/* The first byte of the locks that an owner's exports of a card have, without the bits of the block. */
static uint64_t lock_prefix(unsigned card, uint64_t identity) {
    uint64_t lease = load_relaxed(&account_page->export_lock_id) & (((uint64_t)1 << LEASE_BITS) - 1);
    return lease << FENKA_EXPORT_LOCK_LEASE | owner_bits(identity) << FENKA_EXPORT_LOCK_OWNER |
           (uint64_t)card << FENKA_EXPORT_LOCK_CARD;
}

uint64_t account_export_lock(unsigned card) {
    static uint32_t next;
    uint64_t none = 0, block = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (!load_relaxed(&account_page->export_lock_id))
        __atomic_compare_exchange_n(&account_page->export_lock_id, &none, os_random() >> (64 - LEASE_BITS) | 1, false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return lock_prefix(card, account_identity) | (block & (((uint64_t)1 << FENKA_EXPORT_LOCK_CARD) - 1));
}

/* ---- orphans ---- */

/* By slot: bytes of a dead owner's exports that are in open descriptors. */
struct open_exports {
    unsigned card;
    uint64_t bytes[FENKA_MAX_SLOTS];
};

static void count_open(void *to, const struct export_lock *export_lock) {
    struct open_exports *open = to;
    uint64_t prefix = export_lock->first >> FENKA_EXPORT_LOCK_CARD;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        if (account_is_orphaned(i) &&
            prefix == lock_prefix(open->card, load_relaxed(&account_page->identity[i])) >> FENKA_EXPORT_LOCK_CARD)
            open->bytes[i] += export_lock->bytes;
}

static bool lower(uint64_t *word, uint64_t to) {
    uint64_t seen = load_relaxed(word);
    bool any = false;
    while (seen > to &&
           !(any = __atomic_compare_exchange_n(word, &seen, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)))
        ;
    return any;
}

/* Exports in open descriptors exist. Of all others together, at most the imported bytes exist. */
static bool lower_orphans(unsigned card, uint64_t imported) {
    struct open_exports open = {.card = card};
    bool known = export_locks_each(count_open, &open), any = false;
    for (unsigned i = 0, n = account_slots(); i < n; i++) {
        uint64_t exported = load_relaxed(&account_page->exported[card][i]), kept = known ? open.bytes[i] : exported;
        if (!account_is_orphaned(i) || !exported)
            continue;
        uint64_t rest = exported > kept ? exported - kept : 0, held = rest < imported ? rest : imported;
        imported -= held;
        any |= lower(&account_page->exported[card][i], exported - rest + held);
        if (!account_has_exported(i))
            any |= account_reclaim(i, load_relaxed(&account_page->identity[i]));
    }
    return any;
}

static uint64_t imported_bytes(unsigned card) {
    uint64_t imported = 0;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        imported += load_relaxed(&account_page->imported[card][i]);
    return imported;
}

/* Lowers memory without a living exporter to what can be held at most. True if that was less. */
static bool trim_shared(unsigned card) {
    uint64_t orphaned = 0;
    if (!account_shares(card))
        return false;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        orphaned += account_is_orphaned(i) ? load_relaxed(&account_page->exported[card][i]) : 0;
    uint64_t imported = imported_bytes(card);
    bool any = lower(&account_page->released[card], imported);
    return (orphaned && lower_orphans(card, imported)) || any;
}

/* Checking an owner costs some microseconds, so slots that hold nothing on the card are skipped. A slot without owner
 * holds something only if a program has written there. */
bool account_reap_card(unsigned card) {
    bool any = false;
    for (unsigned i = 0, n = account_slots(); i < n; i++)
        if (load_relaxed(&account_page->memory[card][i]) ||
            (account_shares(card) && load_relaxed(&account_page->imported[card][i])))
            any |= account_reap_slot(i, false) || (!account_page->identity[i] && account_reclaim(i, 0));
    return trim_shared(card) || any;
}

bool account_reap_everything(void) {
    bool any = account_reap_slots(false);
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        any |= trim_shared(card);
    return any;
}

/* ---- exports and imports ---- */

static void add(unsigned card, uint64_t *word, uint64_t bytes) {
    __atomic_fetch_or(&account_page->shared_cards, (uint64_t)1 << card, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(word, bytes, __ATOMIC_SEQ_CST);
}

void account_export(unsigned card, uint64_t bytes) {
    if (account_slot != NO_SLOT)
        add(card, &account_page->exported[card][account_slot], bytes);
}

/* This order counts what is held at every instant. */
void account_release_exported(unsigned card, uint64_t bytes) {
    if (account_slot == NO_SLOT)
        return;
    if (imported_bytes(card))
        __atomic_fetch_add(&account_page->released[card], bytes, __ATOMIC_SEQ_CST);
    account_subtract(&account_page->exported[card][account_slot], bytes);
    account_subtract(&account_page->memory[card][account_slot], bytes);
    trim_shared(card);
}

/* An import that changes no total is accepted, even when the cap has been lowered below what is held. */
bool account_import(unsigned card, uint64_t bytes) {
    if (account_slot == NO_SLOT)
        return true;
    uint64_t before = account_shared_bytes(card);
    add(card, &account_page->imported[card][account_slot], bytes);
    if (account_shared_bytes(card) <= before || account_total(card) <= control_cap(card))
        return true;
    if (account_reap_card(card) && account_total(card) <= control_cap(card))
        return true;
    account_unimport(card, bytes);
    account_count_refusal(card);
    return false;
}

void account_unimport(unsigned card, uint64_t bytes) {
    if (account_slot == NO_SLOT)
        return;
    account_subtract(&account_page->imported[card][account_slot], bytes);
    trim_shared(card);
}
