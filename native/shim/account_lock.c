#include "account_lock.h"

#include "account_page.h"
#include "os.h"

static int own = -1;

static uint64_t lock_byte(uint64_t identity) {
    uint64_t namespace = (identity >> FENKA_IDENTITY_NAMESPACE) & 0xff;
    return identity >> FENKA_IDENTITY_START << FENKA_OWNER_LOCK_START | namespace << FENKA_OWNER_LOCK_NAMESPACE |
           (identity & PID_MASK);
}

bool account_lock_set(void) {
    if (own < 0)
        own = os_open_locked(account_path, lock_byte(account_identity));
    return own >= 0;
}

bool account_is_locked(uint64_t identity) {
    return !(identity & RECLAIMING) && os_byte_locked(account_path, lock_byte(identity));
}

void account_lock_reset(void) { own = -1; }
