/* Memory as programs see it: the slice as if it were the card. */
#ifndef FENKA_SLICE_MEMINFO_H
#define FENKA_SLICE_MEMINFO_H
#include <stdint.h>

#include "account.h"
#include "control.h"
#include "deferred_release.h"
#include "pools.h"

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline void slice_poll_releases(void) {
    deferred_poll();
    pools_poll(false);
}

/* Turns a card's free and total bytes into those of the slice, of which no more is free than on the card. */
static inline void slice_meminfo(unsigned card, uint64_t *free, uint64_t *total) {
    uint64_t cap = least(control_cap(card), *total), used = account_used(card, slice_poll_releases);
    *free = least(*free, cap > used ? cap - used : 0);
    *total = cap;
}
#endif
