#include "deferred_release.h"

#include "account.h"
#include "export_locks.h"
#include "os.h"

static struct os_lock looking;
uint32_t deferred_count;
static uint32_t pass;

void deferred_reset(void) {
    looking.held = 0;
    deferred_count = 0;
}

/* Where two blocks have the same mark, the one waits for the other; where a block has none it stays charged. */
void deferred_add(const struct allocation *block) {
    struct allocation left = {.key = block->owner, .bytes = block->bytes, .kind = LEFT, .card = block->card}, old;
    if (block->owner == NO_EXPORT_LOCK)
        return;
    os_lock(&looking);
    if (allocations_take(LEFT, left.key, &old)) {
        left.bytes += old.bytes;
        __atomic_fetch_sub(&deferred_count, 1, __ATOMIC_RELAXED);
    }
    if (allocations_put(left, &old))
        __atomic_fetch_add(&deferred_count, 1, __ATOMIC_RELAXED);
    os_unlock(&looking);
    deferred_poll();
}

static void still_there(void *to, const struct export_lock *mark) {
    (void)to;
    allocations_mark_seen(mark->first, pass);
}

bool deferred_poll_now(void) {
    struct allocation gone;
    unsigned shard = 0;
    bool any = false;
    os_lock(&looking);
    pass++;
    if (export_locks_each(still_there, NULL))
        for (; allocations_take_unseen(&shard, pass, &gone); any = true) {
            __atomic_fetch_sub(&deferred_count, 1, __ATOMIC_RELAXED);
            account_release_exported(gone.card, gone.bytes);
        }
    os_unlock(&looking);
    return any;
}
