/* Memory of processes that have ended, as far as others hold it, is charged to a slot without process. */
#define _GNU_SOURCE
#include "cardserver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define OFD_GETLK 36 /* F_OFD_GETLK */

struct orphan {
    int file;
    bool shared; /* pieces of it are, by their locks; else all of it, while any other opening has a lock */
    struct node_keep keep;
    uint64_t held[FENKA_NODE_CARDS];
    struct orphan *next;
};
static struct orphan *orphans;

/* Locks are listed in no order. */
static uint64_t locked_between(int file, off_t from, off_t to) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from};
    if (from >= to || fcntl(file, OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK)
        return 0;
    off_t begin = lock.l_start > from ? lock.l_start : from;
    off_t end = lock.l_len && lock.l_start + lock.l_len < to ? lock.l_start + lock.l_len : to;
    return (uint64_t)(end - begin) + locked_between(file, from, begin) + locked_between(file, end, to);
}

static uint64_t held_of(const struct orphan *orphan, uint32_t card) {
    if (orphan->shared)
        return locked_between(orphan->file, (off_t)card << NODE_CARD_SHIFT, ((off_t)card + 1) << NODE_CARD_SHIFT);
    if (card != orphan->keep.card || flock(orphan->file, LOCK_EX | LOCK_NB) == 0)
        return 0;
    return orphan->keep.bytes;
}

/* Brings the card's account up to what is held; false where that is nothing. */
static bool charge_orphan(struct orphan *orphan) {
    bool any = false;
    for (uint32_t card = 0; card < state->card_count; card++) {
        uint64_t held = held_of(orphan, card);
        if (held != orphan->held[card])
            __atomic_fetch_add(&state->memory[card][node_slot], held - orphan->held[card], __ATOMIC_SEQ_CST);
        orphan->held[card] = held;
        any = any || held > 0;
    }
    return any;
}

void poll_orphans(void) {
    for (struct orphan **place = &orphans, *one; (one = *place);) {
        if (charge_orphan(one)) {
            place = &one->next;
            continue;
        }
        *place = one->next;
        close(one->file);
        free(one);
    }
}

bool has_orphans(void) { return orphans; }

void orphan_file(struct client *client) {
    struct orphan *made = calloc(1, sizeof *made);
    if (!made || !take_own_slot()) {
        free(made);
        return;
    }
    made->file = client->file;
    made->shared = client->hello == NODE_HELLO_SHARE;
    memcpy(&made->keep, client->token, sizeof made->keep);
    client->file = -1;
    if (charge_orphan(made)) {
        made->next = orphans;
        orphans = made;
    } else {
        close(made->file);
        free(made);
    }
}

void orphan_files_of(int32_t pid) {
    for (int fd = 0; fd < clients_end(); fd++) {
        struct client *client = client_of(fd);
        if (client->hello && client->file >= 0 && client->pid == pid)
            orphan_file(client);
    }
}
