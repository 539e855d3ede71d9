#include "late.h"

#include "account.h"
#include "marks.h"
#include "os.h"

static struct os_lock looking;
uint32_t late_waiting;
static uint32_t pass;

void late_forget(void) {
    looking.held = 0;
    late_waiting = 0;
}

/* Where two blocks have the same mark, the one waits for the other; where a block has none it stays charged. */
void late_give_up(const struct holding *block) {
    struct holding left = {.key = block->owner, .bytes = block->bytes, .kind = LEFT, .card = block->card}, old;
    if (block->owner == UNMARKED)
        return;
    os_lock(&looking);
    if (holdings_take(LEFT, left.key, &old)) {
        left.bytes += old.bytes;
        __atomic_fetch_sub(&late_waiting, 1, __ATOMIC_RELAXED);
    }
    if (holdings_put(left, &old))
        __atomic_fetch_add(&late_waiting, 1, __ATOMIC_RELAXED);
    os_unlock(&looking);
    late_look();
}

static void still_there(void *to, const struct mark *mark) {
    (void)to;
    holdings_seen(mark->first, pass);
}

bool late_look_now(void) {
    struct holding gone;
    unsigned shard = 0;
    bool any = false;
    os_lock(&looking);
    pass++;
    if (marks_each(still_there, NULL))
        for (; holdings_take_unseen(&shard, pass, &gone); any = true) {
            __atomic_fetch_sub(&late_waiting, 1, __ATOMIC_RELAXED);
            account_give_up(gone.card, gone.bytes);
        }
    os_unlock(&looking);
    return any;
}
