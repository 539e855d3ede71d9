#include "account_owner.h"

#include "account_page.h"
#include "os.h"

/* The agent looks ten times a second, more slowly under load. Without an agent, a program that repeatedly requests too
 * much waits only rarely. */
#define AGENT_TIMEOUT_MS 3000
#define AGENT_RETRY_MS 30000
#define AGENT_POLL_NS 2000000

static uint64_t namespaces; /* of this process, as os_self returns them */

static unsigned namespace_of(uint64_t identity) { return (identity >> FENKA_IDENTITY_NAMESPACE) & 0xff; }

static uint64_t namespace_state(unsigned index) {
    return __atomic_load_n(&account_page->namespace_states[index], __ATOMIC_SEQ_CST);
}

bool account_request_look(void) {
    static uint64_t not_before;
    uint64_t now = os_milliseconds(), until = now + AGENT_TIMEOUT_MS;
    if (now < load_relaxed(&not_before))
        return false;
    uint64_t request = __atomic_add_fetch(&account_page->reap_requested, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&account_page->reap_completed, __ATOMIC_SEQ_CST) < request) {
        if (os_milliseconds() >= until) {
            store_relaxed(&not_before, until + AGENT_RETRY_MS);
            return false;
        }
        os_sleep_until(os_nanoseconds() + AGENT_POLL_NS);
    }
    return true;
}

static bool claim_namespace(unsigned index, uint64_t inodes) {
    uint64_t seen = 0;
    return __atomic_compare_exchange_n(&account_page->pid_namespaces[index], &seen, inodes, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST) ||
           seen == inodes;
}

/* Prefers an entry that already has the inodes, even behind a free one: entries become free when namespaces end. */
static unsigned namespace_index(uint64_t inodes) {
    for (int claiming = 0; claiming < 2; claiming++)
        for (unsigned i = 0; i < FENKA_MAX_NAMESPACES; i++) {
            uint64_t seen = __atomic_load_n(&account_page->pid_namespaces[i], __ATOMIC_SEQ_CST);
            if ((seen && seen != inodes) || namespace_state(i))
                continue;
            if (seen == inodes || (claiming && claim_namespace(i, inodes))) {
                if (!seen && load_relaxed(&account_page->nested_agent))
                    account_request_look();
                return i;
            }
        }
    return FENKA_MAX_NAMESPACES;
}

bool account_identify(void) {
    struct os_process self;
    if (!os_self(&self))
        return false;
    namespaces = self.namespace;
    account_identity = ((self.start_time & START_MASK) << FENKA_IDENTITY_START) |
                       ((uint64_t)namespace_index(self.namespace) << FENKA_IDENTITY_NAMESPACE) | self.pid;
    return true;
}

/* Compares inodes as well as indexes: two processes may have entered one namespace twice while entries were changing.
 * PIDs are comparable within a PID namespace; start times also need the same time namespace. */
static bool same_namespace(uint64_t identity, uint64_t inode_bits) {
    unsigned theirs = namespace_of(identity), ours = namespace_of(account_identity);
    if (theirs == FENKA_MAX_NAMESPACES || ours == FENKA_MAX_NAMESPACES)
        return false;
    return theirs == ours ||
           !((load_relaxed(&account_page->pid_namespaces[theirs]) ^ load_relaxed(&account_page->pid_namespaces[ours])) &
             inode_bits);
}

bool account_same_pids(uint64_t identity) { return same_namespace(identity, UINT32_MAX); }

/* A process that has moved to another time namespace, or sees another /proc, cannot compare start times. */
static bool self_unchanged(void) {
    struct os_process now;
    return os_self(&now) && now.namespace == namespaces &&
           (now.start_time & START_MASK) == account_identity >> FENKA_IDENTITY_START;
}

bool account_owner_dead(uint64_t identity, bool quick) {
    unsigned index = namespace_of(identity);
    if (index != FENKA_MAX_NAMESPACES && namespace_state(index) == FENKA_NAMESPACE_ENDED)
        return true;
    if (!account_same_pids(identity))
        return false;
    uint32_t pid = identity & PID_MASK;
    if (pid == 0 || os_process_absent(pid))
        return true;
    return !quick && same_namespace(identity, UINT64_MAX) &&
           os_process_ended(pid, identity >> FENKA_IDENTITY_START, START_MASK) && self_unchanged();
}
