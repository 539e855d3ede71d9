#include "deferred_release.h"

#include "account.h"
#include "export_locks.h"
#include "os.h"

static struct os_lock lock;
uint32_t deferred_count;
static uint32_t pass;

void deferred_reset(void) {
    lock.held = 0;
    deferred_count = 0;
}

/* Two blocks with the same export lock are released together. A block without one stays charged. */
void deferred_add(const struct allocation *block) {
    struct allocation deferred = {.key = block->owner, .bytes = block->bytes, .kind = DEFERRED, .card = block->card};
    struct allocation old;
    if (block->owner == NO_EXPORT_LOCK)
        return;
    os_lock(&lock);
    if (allocations_take(DEFERRED, deferred.key, &old)) {
        deferred.bytes += old.bytes;
        __atomic_fetch_sub(&deferred_count, 1, __ATOMIC_RELAXED);
    }
    if (allocations_put(deferred, &old))
        __atomic_fetch_add(&deferred_count, 1, __ATOMIC_RELAXED);
    os_unlock(&lock);
    deferred_poll();
}

static void mark_open(void *unused, const struct export_lock *export_lock) {
    (void)unused;
    allocations_mark_seen(export_lock->first, pass);
}

bool deferred_poll_now(void) {
    struct allocation closed;
    unsigned shard = 0;
    bool any = false;
    os_lock(&lock);
    pass++;
    if (export_locks_each(mark_open, NULL))
        for (; allocations_take_unseen(&shard, pass, &closed); any = true) {
            __atomic_fetch_sub(&deferred_count, 1, __ATOMIC_RELAXED);
            account_release_exported(closed.card, closed.bytes);
        }
    os_unlock(&lock);
    return any;
}
