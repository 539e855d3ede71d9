#include "account.h"

#include <stddef.h>

#include "account_lock.h"
#include "account_owner.h"
#include "account_page.h"
#include "account_reap.h"
#include "account_shared.h"
#include "control.h"
#include "os.h"

#define CHARGE_ATTEMPTS 16

/* Some programs query free memory before every step, and a reap costs microseconds per process. An allocation that does
 * not fit always reaps. */
#define REAP_INTERVAL_MS 50

static uint64_t last_total[FENKA_MAX_CARDS]; /* at this process's last charge */
static uint64_t reaped_at[FENKA_MAX_CARDS];  /* ms, by a query */

/* ---- this process's slot ---- */

/* A slot with this process's identity has one of two origins. Before an exec the slot was the previous program's, whose
 * memory the kernel has freed, unless a child inherited it: it is released. Or another copy of this library has mapped
 * the account in this process (dlmopen): then both share the slot. */
static bool share_or_release_own(void) {
    for (unsigned i = 0, n = account_slots(); i < n; i++) {
        uint64_t seen = account_slot_identity(i);
        if ((seen & ~RECLAIMING) != account_identity)
            continue;
        if (seen == account_identity && os_count_mappings(account_page) > 1) {
            account_slot = i;
            return true;
        }
        if (!account_is_locked(seen))
            account_bury(i, seen);
    }
    return false;
}

static void raise_slots_used(uint64_t needed) {
    uint64_t seen = load_relaxed(&account_page->slots_used);
    while (seen < needed && !__atomic_compare_exchange_n(&account_page->slots_used, &seen, needed, false,
                                                         __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* slots_used is raised before the slot is taken: nobody would see a charge above it. */
static bool take_slot(void) {
    for (unsigned i = 0; i < FENKA_MAX_SLOTS; i++) {
        if (account_slot_identity(i))
            continue;
        raise_slots_used(i + 1);
        if (account_swap_identity(i, 0, account_identity)) {
            account_zero_slot(i);
            account_slot = i;
            return true;
        }
    }
    return false;
}

const char *account_open(const char *path) {
    const char *fault = account_page_open(path);
    if (fault)
        return fault;
    if (!account_identify())
        return "cannot be used: /proc does not show this process";
    bool shared = share_or_release_own();
    account_reap_slots(true);
    bool taken = shared || take_slot() || (account_reap_everything() && take_slot());
    if (account_page_lost())
        return "was made shorter while it was used";
    return taken ? NULL : "has no free slot left";
}

void account_reset(void) {
    account_lock_reset();
    account_slot = NO_SLOT;
}

/* ---- charging ---- */

/* Apart from raise_peak(), which is inlined: a peak rises rarely. */
__attribute__((noinline, cold)) static void exchange_peak(uint64_t *peak, uint64_t total) {
    uint64_t seen = load_relaxed(peak);
    while (seen < total && !__atomic_compare_exchange_n(peak, &seen, total, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static void raise_peak(unsigned card, uint64_t total) {
    uint64_t *peak = &account_page->peak[card];
    if (__builtin_expect(load_relaxed(peak) < total, 0))
        exchange_peak(peak, total);
}

/* The check before the charge keeps a request that is too large from disturbing other processes; it is skipped if the
 * last total left more than enough. The check after the charge enforces the limit when several processes charge at
 * once. It has two callers, so only the attribute keeps the compiler from making it a call of each allocation. */
__attribute__((always_inline)) static inline bool try_charge(unsigned card, uint64_t bytes, uint64_t cap,
                                                             bool *collided) {
    uint64_t *own = &account_page->memory[card][account_slot], plenty = cap / 2;
    bool check_first = bytes > plenty || load_relaxed(&last_total[card]) > plenty - bytes;
    if (check_first && account_total(card) > cap - bytes)
        return false;
    __atomic_fetch_add(own, bytes, __ATOMIC_SEQ_CST);
    os_fence_after_update();
    uint64_t total = account_total(card);
    if (load_relaxed(&last_total[card]) != total)
        store_relaxed(&last_total[card], total);
    if (__builtin_expect(total <= cap, 1)) {
        raise_peak(card, total);
        return true;
    }
    account_discharge(card, bytes);
    *collided = true;
    return false;
}

/* Whether owners hold memory whose death only the agent can see, because they are in other namespaces. */
static bool foreign_owners_hold(unsigned card) {
    for (unsigned i = 0, n = account_slots(); i < n; i++) {
        uint64_t identity = account_slot_identity(i);
        if (identity && !account_same_pids(identity) && load_relaxed(&account_page->memory[card][i]))
            return true;
    }
    return false;
}

static bool reap_by_agent(unsigned card) {
    return foreign_owners_hold(card) && account_request_look() && account_reap_card(card);
}

/* Two processes that charge at once may each cause the other's refusal; after a yield one of them comes first. */
__attribute__((noinline, cold)) static bool charge_again(unsigned card, uint64_t bytes, bool collided) {
    bool requested = false;
    for (int attempt = 0; attempt < CHARGE_ATTEMPTS; attempt++) {
        uint64_t cap = control_cap(card);
        if (bytes > cap)
            return false;
        if (!collided && !account_reap_card(card)) {
            if (requested || !reap_by_agent(card))
                return false;
            requested = true;
        }
        if (collided)
            os_yield();
        collided = false;
        if (try_charge(card, bytes, cap, &collided))
            return true;
    }
    return false;
}

bool account_charge(unsigned card, uint64_t bytes) {
    bool collided = false;
    uint64_t cap = control_cap(card);
    if (bytes > cap)
        return false;
    return try_charge(card, bytes, cap, &collided) || charge_again(card, bytes, collided);
}

void account_force_charge(unsigned card, uint64_t bytes) {
    if (account_slot == NO_SLOT)
        return;
    __atomic_fetch_add(&account_page->memory[card][account_slot], bytes, __ATOMIC_SEQ_CST);
    raise_peak(card, account_total(card));
}

void account_discharge(unsigned card, uint64_t bytes) {
    if (account_slot != NO_SLOT)
        account_subtract(&account_page->memory[card][account_slot], bytes);
}

/* ---- queries ---- */

void account_reap(unsigned card) {
    store_relaxed(&reaped_at[card], os_milliseconds());
    account_reap_card(card);
}

uint64_t account_used(unsigned card, void (*before_reap)(void)) {
    if (__builtin_expect(os_milliseconds() - load_relaxed(&reaped_at[card]) >= REAP_INTERVAL_MS, 0)) {
        before_reap();
        account_reap(card);
    }
    return account_total(card);
}

struct fenka_compute_budget *account_compute_budget(unsigned card) {
    return account_page && account_slot != NO_SLOT ? &account_page->compute_budgets[card] : NULL;
}

int account_next_process(unsigned from, unsigned card, uint32_t *pid, uint64_t *bytes) {
    for (unsigned i = from, n = account_slots(); i < n; i++) {
        uint64_t identity = account_slot_identity(i);
        if (!identity || (identity & (RECLAIMING | ORPHANED)) || !account_same_pids(identity))
            continue;
        *pid = identity & PID_MASK;
        *bytes = load_relaxed(&account_page->memory[card][i]);
        return (int)i;
    }
    return -1;
}
