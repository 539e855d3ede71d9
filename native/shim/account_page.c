#include "account_page.h"

#include <stddef.h>
#include <stdio.h>

#include "os.h"

/* More than any cap, so that a lost page grants nothing. */
#define MORE_THAN_ANY_CAP ((uint64_t)1 << 62)

_Static_assert(sizeof(((struct fenka_account *)0)->identity) == 8 * FENKA_MAX_SLOTS, "lease.h is consistent");

struct fenka_account *account_page;
char account_path[4096];
uint64_t account_identity;
uint32_t account_slot = NO_SLOT;

static bool lost;

bool account_page_lost(void) { return __atomic_load_n(&lost, __ATOMIC_ACQUIRE); }

/* Runs in a signal handler after another process has truncated the file. What is charged is then unknown. So nothing
 * more is granted; frees still reach the driver. */
static void on_lost(void) {
    uint32_t own = account_slot == NO_SLOT ? 0 : account_slot;
    account_page->magic = FENKA_ACCOUNT_MAGIC;
    account_page->slots_used = FENKA_MAX_SLOTS;
    account_page->identity[own] = account_identity;
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        account_page->memory[card][own] = MORE_THAN_ANY_CAP;
    __atomic_store_n(&lost, true, __ATOMIC_RELEASE);
}

static const char *page_fault(void) {
    if (account_page->magic != FENKA_ACCOUNT_MAGIC)
        return "is not an account";
    if (account_page->version != FENKA_ACCOUNT_VERSION)
        return "is of a version that this library does not write";
    return account_page->slot_count == FENKA_MAX_SLOTS ? NULL : "states a number of slots that is not its own";
}

const char *account_page_open(const char *path) {
    void *address;
    if (account_page)
        return NULL;
    switch (os_map(path, sizeof *account_page, true, &address)) {
    case OS_OK:
        break;
    case OS_MISSING:
        return "does not exist";
    case OS_WRONG_SIZE:
        return "does not have the size of an account";
    default:
        return "cannot be written";
    }
    account_page = address;
    snprintf(account_path, sizeof account_path, "%s", path);
    os_guard(account_page, sizeof *account_page, on_lost);
    const char *fault = page_fault();
    if (fault) {
        os_unguard(account_page);
        os_unmap(account_page, sizeof *account_page);
        account_page = NULL;
    }
    return fault;
}
