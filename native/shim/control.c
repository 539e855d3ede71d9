#include "control.h"

#include <string.h>

#include "fenka/lease.h"
#include "os.h"

_Static_assert(sizeof(struct fenka_control) <= FENKA_CONTROL_BYTES, "a control page is one page");

static const struct fenka_control *page;
static struct fenka_control last; /* the last consistent page; its UUIDs and card_count never change */

/* Does not wait: an agent that was killed while writing leaves an odd generation. */
static bool copy_consistent(struct fenka_control *out) {
    uint64_t before = __atomic_load_n(&page->generation, __ATOMIC_ACQUIRE);
    memcpy(out, page, sizeof *out);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    out->generation = before;
    return !(before & 1) && __atomic_load_n(&page->generation, __ATOMIC_RELAXED) == before;
}

static const char *card_fault(const struct fenka_control *c, unsigned card) {
    const struct fenka_card_limit *limit = &c->cards[card];
    if (strnlen(limit->uuid, sizeof limit->uuid) != 40)
        return "names a card by something that is not a UUID";
    if (limit->memory_bytes == 0)
        return "gives no memory on one of its cards";
    if (limit->compute_percent == 0 || limit->compute_percent > 100)
        return "gives a share of compute that is not 1 to 100 percent";
    if (limit->compute_mode > FENKA_COMPUTE_WEIGHT)
        return "limits compute in a way that this library does not know";
    for (unsigned other = 0; other < card; other++)
        if (!strcmp(c->cards[other].uuid, limit->uuid))
            return "names a card twice";
    return NULL;
}

static const char *page_fault(const struct fenka_control *c) {
    if (c->magic != FENKA_CONTROL_MAGIC)
        return "is not a control page";
    if (c->version != FENKA_LAYOUT_VERSION)
        return "is of a version that this library does not read";
    if (c->bytes != FENKA_CONTROL_BYTES)
        return "states a size that is not its own";
    if (c->card_count == 0 || c->card_count > FENKA_MAX_CARDS)
        return "states an impossible number of cards";
    for (unsigned card = 0; card < c->card_count; card++) {
        const char *fault = card_fault(c, card);
        if (fault)
            return fault;
    }
    return NULL;
}

static const char *map_fault(enum os_result result) {
    switch (result) {
    case OS_OK:
        return NULL;
    case OS_MISSING:
        return "does not exist";
    case OS_WRONG_SIZE:
        return "does not have the size of a control page";
    default:
        return "cannot be read";
    }
}

static bool limited; /* any card's compute */

static void update_limited(void) {
    bool any = false;
    for (unsigned card = 0; card < last.card_count; card++)
        any |= control_percent(card) < 100 || control_mode(card) != FENKA_COMPUTE_HARD;
    __atomic_store_n(&limited, any, __ATOMIC_RELAXED);
}

const char *control_open(const char *path) {
    void *address;
    if (page)
        return NULL;
    const char *fault = map_fault(os_map(path, FENKA_CONTROL_BYTES, false, &address));
    if (fault)
        return fault;
    page = address;
    os_guard(address, FENKA_CONTROL_BYTES, NULL); /* after a truncation the last page stays valid */
    bool consistent = false;
    for (int i = 0; i < 1000 && !(consistent = copy_consistent(&last)); i++)
        os_yield();
    fault = consistent ? page_fault(&last) : "was left half written";
    if (fault) {
        page = NULL;
        os_unguard(address);
        os_unmap(address, FENKA_CONTROL_BYTES);
    } else
        update_limited();
    return fault;
}

uint64_t control_generation(void) { return __atomic_load_n(&page->generation, __ATOMIC_RELAXED); }

unsigned control_cards(void) { return last.card_count; }

const char *control_uuid(unsigned card) { return last.cards[card].uuid; }

int control_find_card(const char *uuid36) {
    for (unsigned card = 0; card < last.card_count; card++)
        if (!strncmp(last.cards[card].uuid + 4, uuid36, 36))
            return (int)card;
    return -1;
}

/* A page that is being written, or that names other cards, is ignored. Limits are stored one by one: a reader in
 * between sees values that were all granted at some time. */
__attribute__((noinline, cold)) static void refresh(void) {
    struct fenka_control fresh;
    if (!copy_consistent(&fresh) || page_fault(&fresh) || fresh.card_count != last.card_count)
        return;
    for (unsigned card = 0; card < fresh.card_count; card++) {
        if (strcmp(fresh.cards[card].uuid, last.cards[card].uuid))
            return;
        __atomic_store_n(&last.cards[card].memory_bytes, fresh.cards[card].memory_bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&last.cards[card].context_bytes, fresh.cards[card].context_bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&last.cards[card].compute_percent, fresh.cards[card].compute_percent, __ATOMIC_RELAXED);
        __atomic_store_n(&last.cards[card].compute_mode, fresh.cards[card].compute_mode, __ATOMIC_RELAXED);
    }
    update_limited();
    __atomic_store_n(&last.generation, fresh.generation, __ATOMIC_RELEASE);
}

static inline void refresh_if_changed(void) {
    uint64_t now = __atomic_load_n(&page->generation, __ATOMIC_RELAXED);
    if (__builtin_expect(now != __atomic_load_n(&last.generation, __ATOMIC_RELAXED), 0))
        refresh();
}

uint64_t control_cap(unsigned card) {
    refresh_if_changed();
    return __atomic_load_n(&last.cards[card].memory_bytes, __ATOMIC_RELAXED);
}

uint64_t control_context_bytes(unsigned card) {
    return __atomic_load_n(&last.cards[card].context_bytes, __ATOMIC_RELAXED);
}

uint64_t control_yielding_since(void) { return __atomic_load_n(&page->yielding_since, __ATOMIC_RELAXED); }

bool control_limits_compute(void) {
    if (__builtin_expect(!__atomic_load_n(&page, __ATOMIC_RELAXED), 0))
        return false;
    refresh_if_changed();
    return __atomic_load_n(&limited, __ATOMIC_RELAXED) || control_yielding_since();
}

uint32_t control_percent(unsigned card) { return __atomic_load_n(&last.cards[card].compute_percent, __ATOMIC_RELAXED); }

uint32_t control_mode(unsigned card) { return __atomic_load_n(&last.cards[card].compute_mode, __ATOMIC_RELAXED); }

bool control_feedback(unsigned card, struct control_feedback *out) {
    const struct fenka_card_limit *limit = &page->cards[card];
    uint64_t seq = __atomic_load_n(&limit->feedback_seq, __ATOMIC_ACQUIRE);
    out->feedback_seq = seq;
    out->at = __atomic_load_n(&limit->feedback_at, __ATOMIC_RELAXED);
    out->busy_ns = __atomic_load_n(&limit->busy_ns, __ATOMIC_RELAXED);
    out->allowed = __atomic_load_n(&limit->allowed, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return seq && !(seq & 1) && __atomic_load_n(&limit->feedback_seq, __ATOMIC_RELAXED) == seq;
}
