#include "account.h"

#include <stddef.h>

#include "control.h"
#include "fenka/lease.h"
#include "export_locks.h"
#include "os.h"

#define RECLAIMING ((uint64_t)1 << FENKA_IDENTITY_RECLAIMING)
#define ORPHANED ((uint64_t)1 << FENKA_IDENTITY_ORPHANED)
#define PID_MASK (((uint64_t)1 << FENKA_IDENTITY_RECLAIMING) - 1)
#define START_MASK (((uint64_t)1 << (64 - FENKA_IDENTITY_START)) - 1)
#define NO_SLOT UINT32_MAX
#define ATTEMPTS 16

/* Some programs ask how much is free before every step; judging costs microseconds a process. An allocation
 * that finds too little judges at once, however recently that was done. */
#define JUDGE_EVERY_MS 50

/* An agent looks ten times a second, less often while its looks take long. Without one, a program that asks for too
 * much again and again waits rarely. */
#define ANSWERED_WITHIN_MS 3000
#define SILENCE_MS 30000
#define LOOK_EVERY_NS 2000000

_Static_assert(sizeof(((struct fenka_account *)0)->identity) == 8 * FENKA_MAX_SLOTS, "lease.h agrees with itself");

static struct fenka_account *page;
static uint64_t identity; /* this process */
static uint64_t namespaces; /* its own, as os_self tells them */
static uint32_t slot = NO_SLOT;
static uint64_t last_sum[FENKA_MAX_CARDS]; /* as this process saw it when it charged last */
static uint64_t judged[FENKA_MAX_CARDS];   /* when the living were last told from the dead for a query */

static unsigned namespace_of(uint64_t id) {
    return (id >> FENKA_IDENTITY_NAMESPACE) & 0xff;
}

/* Slots up to the high-water mark, rounded up for the vector unit: those beyond it are zero. */
static unsigned slots_used(void) {
    uint64_t used = __atomic_load_n(&page->slots_used, __ATOMIC_RELAXED);
    return used < FENKA_MAX_SLOTS ? ((unsigned)used + 7) & ~7u : FENKA_MAX_SLOTS;
}

static bool shares(unsigned card) {
    return __builtin_expect(__atomic_load_n(&page->shared_cards, __ATOMIC_RELAXED) >> card & 1, 0);
}

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static bool is_orphaned(unsigned i) {
    return load(&page->identity[i]) & ORPHANED;
}

/* Held by others than its maker: see lease.h. */
__attribute__((noinline, cold)) static uint64_t beyond(unsigned card) {
    uint64_t released = load(&page->released[card]), left = 0, shared = released, strange = 0;
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        uint64_t exported = load(&page->exported[card][i]);
        shared += exported;
        if (exported && is_orphaned(i))
            left += exported;
    }
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        uint64_t imported = load(&page->imported[card][i]);
        strange += imported > shared ? imported - shared : 0;
    }
    return released + left + strange;
}

/* Plain loads, for atomic ones would not be vectorised: an aligned word is read whole on every machine that we
 * build for, and the fence before is what makes it recent enough. */
__attribute__((no_sanitize("thread"))) static uint64_t sum(unsigned card) {
    const uint64_t *held = page->memory[card];
    uint64_t total = 0;
    for (unsigned i = 0, n = slots_used(); i < n; i++)
        total += held[i];
    return shares(card) ? total + beyond(card) : total;
}

static uint64_t namespace_state(unsigned index) {
    return __atomic_load_n(&page->namespace_states[index], __ATOMIC_SEQ_CST);
}

/* An entry that has the inodes comes before a free one in front of it: namespaces end, and their entries with them. */
static unsigned namespace_index(uint64_t inodes) {
    for (int claiming = 0; claiming < 2; claiming++)
        for (unsigned i = 0; i < FENKA_MAX_NAMESPACES; i++) {
            uint64_t seen = __atomic_load_n(&page->pid_namespaces[i], __ATOMIC_SEQ_CST);
            if ((seen && seen != inodes) || namespace_state(i))
                continue;
            if (seen == inodes ||
                (claiming && (__atomic_compare_exchange_n(&page->pid_namespaces[i], &seen, inodes, false,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
                              seen == inodes)))
                return i;
        }
    return FENKA_MAX_NAMESPACES;
}

/* Two who looked while another entry became free may have put one namespace into both. PIDs mean the same in a
 * PID namespace; start times only where the time namespace is the same, too. */
static bool same_namespace(uint64_t id, uint64_t bits) {
    unsigned theirs = namespace_of(id), ours = namespace_of(identity);
    if (theirs == FENKA_MAX_NAMESPACES || ours == FENKA_MAX_NAMESPACES)
        return false;
    return theirs == ours || !((load(&page->pid_namespaces[theirs]) ^ load(&page->pid_namespaces[ours])) & bits);
}

static bool same_pids(uint64_t id) {
    return same_namespace(id, UINT32_MAX);
}

static bool swap_identity(unsigned i, uint64_t seen, uint64_t next) {
    return __atomic_compare_exchange_n(&page->identity[i], &seen, next, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static void clear(uint64_t *word) {
    if (__atomic_load_n(word, __ATOMIC_RELAXED))
        __atomic_store_n(word, 0, __ATOMIC_RELAXED);
}

/* Each card's row is another page, and a write to what is zero already would be 16 page faults in every start.
 * Exports first: what others hold of them is then counted twice for a moment, and not for a moment at all. */
static void zero(unsigned i) {
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++) {
        if (shares(card)) {
            clear(&page->exported[card][i]);
            clear(&page->imported[card][i]);
        }
        clear(&page->memory[card][i]);
    }
}

/* A slot is zeroed only by the one who has put its own name on it, and only then free for others. */
static bool empty(unsigned i, uint64_t seen) {
    if (!swap_identity(i, seen, identity | RECLAIMING))
        return false;
    zero(i);
    return swap_identity(i, identity | RECLAIMING, 0);
}

/* Who has moved to another time namespace, or sees another /proc, knows nothing of others any more. */
static bool still_ourselves(void) {
    struct os_process now;
    return os_self(&now) && now.namespace == namespaces &&
           (now.start_time & START_MASK) == identity >> FENKA_IDENTITY_START;
}

static bool dead(uint64_t id, bool quickly) {
    if (namespace_of(id) != FENKA_MAX_NAMESPACES && namespace_state(namespace_of(id)) == FENKA_NAMESPACE_ENDED)
        return true;
    if (!same_pids(id))
        return false;
    uint32_t pid = id & PID_MASK;
    if (pid == 0 || os_process_absent(pid))
        return true;
    return !quickly && same_namespace(id, UINT64_MAX) && os_process_ended(pid, id >> FENKA_IDENTITY_START, START_MASK) && still_ourselves();
}

static bool has_exported(unsigned i) {
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        if (shares(card) && load(&page->exported[card][i]))
            return true;
    return false;
}

static bool forget_own(unsigned i) {
    uint64_t any = 0;
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++) {
        any |= load(&page->memory[card][i]) | load(&page->imported[card][i]);
        clear(&page->imported[card][i]);
        clear(&page->memory[card][i]);
    }
    return any;
}

/* The dead owner's slot becomes an orphans' slot in one step; what is zeroed then is zeroed by whoever comes by. */
static bool bury(unsigned i, uint64_t seen) {
    if (!has_exported(i))
        return empty(i, seen);
    if (!swap_identity(i, seen, (seen & ~RECLAIMING) | ORPHANED))
        return false;
    forget_own(i);
    return true;
}

static bool reap_slot(unsigned i, bool quickly) {
    uint64_t seen = __atomic_load_n(&page->identity[i], __ATOMIC_ACQUIRE);
    if (seen & ORPHANED)
        return forget_own(i);
    return seen && (seen & ~RECLAIMING) != identity && dead(seen, quickly) && bury(i, seen);
}

/* Frees the slots of the dead; true when there were any. */
static bool reap(bool quickly) {
    bool any = false;
    for (unsigned i = 0, n = slots_used(); i < n; i++)
        any |= reap_slot(i, quickly);
    return any;
}

/* ---- what is left of the dead ---- */

#define LEASE_BITS 20
#define OWNER_BITS 20

static uint64_t owner_bits(uint64_t id) {
    return (id & ~(RECLAIMING | ORPHANED)) * 0x9e3779b97f4a7c15u >> (64 - OWNER_BITS);
}

static uint64_t lease_mark(void) {
    return load(&page->export_lock_id) & (((uint64_t)1 << LEASE_BITS) - 1);
}

static uint64_t marks_begin(unsigned card, uint64_t id) {
    return lease_mark() << FENKA_EXPORT_LOCK_LEASE | owner_bits(id) << FENKA_EXPORT_LOCK_OWNER | (uint64_t)card << FENKA_EXPORT_LOCK_CARD;
}

struct left {
    unsigned card;
    uint64_t in_descriptors[FENKA_MAX_SLOTS];
};

static void count_left(void *to, const struct export_lock *mark) {
    struct left *left = to;
    for (unsigned i = 0, n = slots_used(); i < n; i++)
        if (is_orphaned(i) &&
            mark->first >> FENKA_EXPORT_LOCK_CARD == marks_begin(left->card, load(&page->identity[i])) >> FENKA_EXPORT_LOCK_CARD)
            left->in_descriptors[i] += mark->bytes;
}

static bool lower(uint64_t *word, uint64_t to) {
    uint64_t seen = load(word);
    bool any = false;
    while (seen > to && !(any = __atomic_compare_exchange_n(word, &seen, to, false, __ATOMIC_SEQ_CST,
                                                            __ATOMIC_SEQ_CST)))
        ;
    return any;
}

/* What is in descriptors of a maker is there; of all the rest together there is at most what is imported. */
static bool lower_orphans(unsigned card, uint64_t imported) {
    struct left left = {.card = card};
    bool known = export_locks_each(count_left, &left), any = false;
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        uint64_t exported = load(&page->exported[card][i]), there = known ? left.in_descriptors[i] : exported;
        if (!is_orphaned(i) || !exported)
            continue;
        uint64_t rest = exported > there ? exported - there : 0, held = rest < imported ? rest : imported;
        imported -= held;
        any |= lower(&page->exported[card][i], exported - rest + held);
        if (!has_exported(i))
            any |= empty(i, load(&page->identity[i]));
    }
    return any;
}

/* Counts down what has lost its maker to what can be held; true when that was less. */
static bool trim_shared(unsigned card) {
    uint64_t imported = 0, orphaned = 0;
    if (!shares(card))
        return false;
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        imported += load(&page->imported[card][i]);
        orphaned += is_orphaned(i) ? load(&page->exported[card][i]) : 0;
    }
    bool any = lower(&page->released[card], imported);
    return (orphaned && lower_orphans(card, imported)) || any;
}

/* The same where it matters for one card: judging costs some microseconds a process, and many hold nothing.
 * A slot that is nobody's holds nothing either, unless a program has scribbled there. */
static bool reap_on(unsigned card) {
    bool any = false;
    for (unsigned i = 0, n = slots_used(); i < n; i++)
        if (load(&page->memory[card][i]) || (shares(card) && load(&page->imported[card][i])))
            any |= reap_slot(i, false) || (!page->identity[i] && empty(i, 0));
    return trim_shared(card) || any;
}

/* After exec the new program finds its predecessor's slots under its own name: the kernel has closed what
 * the predecessor held, so the slots start again from nothing. But the name may also be that of another copy
 * of this library, loaded by dlmopen into a namespace of its own: that one has the account mapped in this very
 * process, and then the two share its slot. */
static bool share_or_drop(void) {
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        uint64_t seen = __atomic_load_n(&page->identity[i], __ATOMIC_ACQUIRE);
        if ((seen & ~RECLAIMING) != identity)
            continue;
        if (seen == identity && os_count_mappings(page) > 1) {
            slot = i;
            return true;
        }
        bury(i, seen);
    }
    return false;
}

static bool reap_all(void) {
    bool any = reap(false);
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        any |= trim_shared(card);
    return any;
}

static void raise_mark(uint64_t needed) {
    uint64_t seen = __atomic_load_n(&page->slots_used, __ATOMIC_RELAXED);
    while (seen < needed && !__atomic_compare_exchange_n(&page->slots_used, &seen, needed, false,
                                                         __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* The mark rises before the slot is taken: a charge beyond it would be seen by nobody. */
static bool take_slot(void) {
    for (unsigned i = 0; i < FENKA_MAX_SLOTS; i++) {
        if (__atomic_load_n(&page->identity[i], __ATOMIC_ACQUIRE))
            continue;
        raise_mark(i + 1);
        if (swap_identity(i, 0, identity)) {
            zero(i);
            slot = i;
            return true;
        }
    }
    return false;
}

static const char *page_fault(void) {
    if (page->magic != FENKA_ACCOUNT_MAGIC)
        return "is not an account";
    if (page->version != FENKA_ACCOUNT_VERSION)
        return "is of a version that this library does not write";
    return page->slot_count == FENKA_MAX_SLOTS ? NULL : "states a number of slots that is not its own";
}

/* In a signal's handler. Somebody has cut the account off: what we hold is not known any more, nor what others hold.
 * So nothing more is granted, by sums that are beyond every cap; what is given back is given back to the driver. */
#define BEYOND_ALL ((uint64_t)1 << 62)

static bool lost;

static void lose(void) {
    uint32_t own = slot == NO_SLOT ? 0 : slot;
    page->magic = FENKA_ACCOUNT_MAGIC;
    page->slots_used = FENKA_MAX_SLOTS;
    page->identity[own] = identity;
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        page->memory[card][own] = BEYOND_ALL;
    __atomic_store_n(&lost, true, __ATOMIC_RELEASE);
}

static const char *map(const char *path) {
    void *address;
    switch (os_map(path, sizeof *page, true, &address)) {
    case OS_OK:
        break;
    case OS_MISSING:
        return "does not exist";
    case OS_WRONG_SIZE:
        return "does not have the size of an account";
    default:
        return "cannot be written";
    }
    page = address;
    os_guard(page, sizeof *page, lose);
    const char *fault = page_fault();
    if (fault) {
        os_unguard(page);
        os_unmap(page, sizeof *page);
        page = NULL;
    }
    return fault;
}

const char *account_open(const char *path) {
    struct os_process self;
    const char *fault = page ? NULL : map(path);
    if (fault)
        return fault;
    if (!os_self(&self))
        return "cannot be used: /proc does not show this process";
    namespaces = self.namespace;
    identity = ((self.start_time & START_MASK) << FENKA_IDENTITY_START) |
               ((uint64_t)namespace_index(self.namespace) << FENKA_IDENTITY_NAMESPACE) | self.pid;
    bool shared = share_or_drop();
    reap(true);
    bool taken = shared || take_slot() || (reap_all() && take_slot());
    if (__atomic_load_n(&lost, __ATOMIC_ACQUIRE))
        return "was made shorter while it was used";
    if (taken)
        return NULL;
    return "has no free slot left";
}

void account_reset(void) {
    slot = NO_SLOT;
}

/* Looking before adding keeps a request that is too big from disturbing others for an instant; where the last
 * sum left more than enough, that is skipped. Looking after adding is what makes the limit hold when several
 * ask at once. */
static bool try_charge(unsigned card, uint64_t bytes, uint64_t cap, bool *collided) {
    uint64_t *own = &page->memory[card][slot], plenty = cap / 2;
    bool look = bytes > plenty || __atomic_load_n(&last_sum[card], __ATOMIC_RELAXED) > plenty - bytes;
    if (look && sum(card) > cap - bytes)
        return false;
    __atomic_fetch_add(own, bytes, __ATOMIC_SEQ_CST);
    os_fence_after_update();
    uint64_t total = sum(card);
    if (__atomic_load_n(&last_sum[card], __ATOMIC_RELAXED) != total)
        __atomic_store_n(&last_sum[card], total, __ATOMIC_RELAXED);
    if (__builtin_expect(total <= cap, 1))
        return true;
    account_discharge(card, bytes);
    *collided = true;
    return false;
}

/* Owners of other namespaces, of whom only the agent can say that they are dead. */
static bool others_hold(unsigned card) {
    for (unsigned i = 0, n = slots_used(); i < n; i++) {
        uint64_t id = __atomic_load_n(&page->identity[i], __ATOMIC_ACQUIRE);
        if (id && !same_pids(id) && __atomic_load_n(&page->memory[card][i], __ATOMIC_RELAXED))
            return true;
    }
    return false;
}

/* Has the agent look, and waits for it, but not again at once where none answers. */
static bool agent_judges(unsigned card) {
    static uint64_t not_before;
    uint64_t now = os_milliseconds(), until = now + ANSWERED_WITHIN_MS;
    if (now < __atomic_load_n(&not_before, __ATOMIC_RELAXED) || !others_hold(card))
        return false;
    uint64_t ours = __atomic_add_fetch(&page->reap_requested, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&page->reap_completed, __ATOMIC_SEQ_CST) < ours) {
        if (os_milliseconds() >= until) {
            __atomic_store_n(&not_before, until + SILENCE_MS, __ATOMIC_RELAXED);
            return false;
        }
        os_sleep_until(os_nanoseconds() + LOOK_EVERY_NS);
    }
    return reap_on(card);
}

/* Two who ask at once may each refuse the other's share; after a pause one of them comes first. */
__attribute__((noinline, cold)) static bool charge_again(unsigned card, uint64_t bytes, bool collided) {
    bool asked = false;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        uint64_t cap = control_cap(card);
        if (bytes > cap)
            return false;
        if (!collided && !reap_on(card)) {
            if (asked || !agent_judges(card))
                return false;
            asked = true;
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

/* Never below nothing: another program may have written into the slot, and an underflow would fill the card. */
static inline void subtract(uint64_t *own, uint64_t bytes) {
    uint64_t seen = __atomic_load_n(own, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(own, &seen, seen > bytes ? seen - bytes : 0, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
        ;
}

void account_force_charge(unsigned card, uint64_t bytes) {
    if (slot != NO_SLOT)
        __atomic_fetch_add(&page->memory[card][slot], bytes, __ATOMIC_SEQ_CST);
}

void account_discharge(unsigned card, uint64_t bytes) {
    if (slot != NO_SLOT)
        subtract(&page->memory[card][slot], bytes);
}

static void share(unsigned card, uint64_t *own, uint64_t bytes) {
    __atomic_fetch_or(&page->shared_cards, (uint64_t)1 << card, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(own, bytes, __ATOMIC_SEQ_CST);
}

void account_export(unsigned card, uint64_t bytes) {
    if (slot != NO_SLOT)
        share(card, &page->exported[card][slot], bytes);
}

uint64_t account_export_lock(unsigned card) {
    static uint32_t next;
    uint64_t none = 0, block = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (!load(&page->export_lock_id))
        __atomic_compare_exchange_n(&page->export_lock_id, &none, os_random() >> (64 - LEASE_BITS) | 1, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST);
    return marks_begin(card, identity) | (block & (((uint64_t)1 << FENKA_EXPORT_LOCK_CARD) - 1));
}

/* In this order what is held is counted at every instant. */
void account_release_exported(unsigned card, uint64_t bytes) {
    uint64_t imported = 0;
    if (slot == NO_SLOT)
        return;
    for (unsigned i = 0, n = slots_used(); i < n; i++)
        imported += load(&page->imported[card][i]);
    if (imported)
        __atomic_fetch_add(&page->released[card], bytes, __ATOMIC_SEQ_CST);
    subtract(&page->exported[card][slot], bytes);
    subtract(&page->memory[card][slot], bytes);
    trim_shared(card);
}

/* What changes no sum is let in, also where a lowered cap leaves less than nothing. */
bool account_import(unsigned card, uint64_t bytes) {
    if (slot == NO_SLOT)
        return true;
    uint64_t before = beyond(card);
    share(card, &page->imported[card][slot], bytes);
    if (beyond(card) <= before || sum(card) <= control_cap(card))
        return true;
    if (reap_on(card) && sum(card) <= control_cap(card))
        return true;
    account_unimport(card, bytes);
    return false;
}

void account_unimport(unsigned card, uint64_t bytes) {
    if (slot == NO_SLOT)
        return;
    subtract(&page->imported[card][slot], bytes);
    trim_shared(card);
}

void account_reap(unsigned card) {
    __atomic_store_n(&judged[card], os_milliseconds(), __ATOMIC_RELAXED);
    reap_on(card);
}

uint64_t account_used(unsigned card, void (*first)(void)) {
    if (__builtin_expect(os_milliseconds() - __atomic_load_n(&judged[card], __ATOMIC_RELAXED) >= JUDGE_EVERY_MS, 0)) {
        first();
        account_reap(card);
    }
    return sum(card);
}

struct fenka_compute_budget *account_compute_budget(unsigned card) {
    return page && slot != NO_SLOT ? &page->compute_budgets[card] : NULL;
}

int account_next_process(unsigned from, unsigned card, uint32_t *pid, uint64_t *bytes) {
    for (unsigned i = from, n = slots_used(); i < n; i++) {
        uint64_t id = __atomic_load_n(&page->identity[i], __ATOMIC_ACQUIRE);
        if (!id || (id & (RECLAIMING | ORPHANED)) || !same_pids(id))
            continue;
        *pid = id & PID_MASK;
        *bytes = __atomic_load_n(&page->memory[card][i], __ATOMIC_RELAXED);
        return (int)i;
    }
    return -1;
}
