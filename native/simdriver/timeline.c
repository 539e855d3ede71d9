/* Utilisation is read from idle time, not from busy time. A card becomes idle in the past, when its
 * queue had run dry before the next launch; so idle time can be written down exactly when it is known,
 * while busy time would have to be written for kernels that lie ahead, without bound. */
#include "timeline.h"

#include <errno.h>
#include <time.h>

#include "node.h"

#define WINDOW_NS 1000000000ull
#define BUCKET_MASK ((1ull << FENKA_NODE_BUCKET_SHIFT) - 1)

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t sooner(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void bucket_add(uint64_t *bucket, uint64_t ordinal, uint64_t ns)
{
    uint64_t seen = __atomic_load_n(bucket, __ATOMIC_RELAXED), wanted;
    do {
        uint64_t held = seen >> FENKA_NODE_BUCKET_SHIFT == ordinal ? seen & BUCKET_MASK : 0;
        wanted = ordinal << FENKA_NODE_BUCKET_SHIFT | sooner(held + ns, BUCKET_MASK);
    } while (!__atomic_compare_exchange_n(bucket, &seen, wanted, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
}

/* Spreads [from, to) over a ring of buckets, leaving out what the ring cannot hold beside the last
 * second. */
static void ring_add(uint64_t *ring, uint64_t count, uint64_t width, uint64_t from, uint64_t to)
{
    uint64_t now = node_now();
    from = later(from, now > WINDOW_NS + width ? now - WINDOW_NS - width : 0);
    to = sooner(to, now + count * width - WINDOW_NS - 2 * width);
    while (from < to) {
        uint64_t ordinal = from / width;
        uint64_t end = sooner(to, (ordinal + 1) * width);
        bucket_add(&ring[ordinal % count], ordinal, end - from);
        from = end;
    }
}

/* Sum over the last second; of the bucket that is cut by its beginning, the fitting share. */
static uint64_t ring_sum(const uint64_t *ring, uint64_t count, uint64_t width, uint64_t now)
{
    uint64_t from = now > WINDOW_NS ? now - WINDOW_NS : 0, sum = 0;
    for (uint64_t ordinal = from / width; ordinal <= now / width; ordinal++) {
        uint64_t word = __atomic_load_n(&ring[ordinal % count], __ATOMIC_RELAXED);
        if (word >> FENKA_NODE_BUCKET_SHIFT != ordinal)
            continue;
        uint64_t held = word & BUCKET_MASK, begin = ordinal * width;
        if (begin < from)
            held = held * (begin + width - from) / width;
        if (begin + width > now) /* queued work may lie beyond now */
            held = sooner(held, now - begin);
        sum += held;
    }
    return sooner(sum, WINDOW_NS);
}

uint64_t timeline_add(uint32_t card, uint64_t earliest_ns, uint64_t duration_ns)
{
    struct fenka_node_card *device = &node_state->cards[card];
    uint64_t free_at = __atomic_load_n(&device->free_at_ns, __ATOMIC_ACQUIRE);
    uint64_t start, end;
    do {
        start = later(later(node_now(), earliest_ns), free_at);
        end = start + duration_ns;
    } while (!__atomic_compare_exchange_n(&device->free_at_ns, &free_at, end, false,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    if (start > free_at)
        ring_add(device->idle, FENKA_NODE_IDLE_BUCKETS, FENKA_NODE_IDLE_BUCKET_NS, free_at, start);
    if (node_owns_slot()) {
        ring_add(node_state->busy[card][node_slot], FENKA_NODE_BUSY_BUCKETS,
                 FENKA_NODE_BUSY_BUCKET_NS, start, end);
        __atomic_fetch_add(&node_state->processes[node_slot].busy_ns[card], duration_ns,
                           __ATOMIC_RELAXED);
    }
    return end;
}

void timeline_wait(uint64_t until_ns)
{
    if (node_now() >= until_ns)
        return;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                             .tv_nsec = (long)(until_ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
}

uint64_t timeline_card_busy(uint32_t card)
{
    const struct fenka_node_card *device = &node_state->cards[card];
    uint64_t free_at = __atomic_load_n(&device->free_at_ns, __ATOMIC_ACQUIRE), now = node_now();
    uint64_t idle =
        ring_sum(device->idle, FENKA_NODE_IDLE_BUCKETS, FENKA_NODE_IDLE_BUCKET_NS, now);
    if (free_at < now)
        idle += now - free_at;
    return WINDOW_NS - sooner(idle, WINDOW_NS);
}

uint64_t timeline_process_busy(uint32_t card, uint32_t slot)
{
    return ring_sum(node_state->busy[card][slot], FENKA_NODE_BUSY_BUCKETS,
                    FENKA_NODE_BUSY_BUCKET_NS, node_now());
}
