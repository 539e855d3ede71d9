/* Each access to a card's time line first brings it up to date: it records which process used the card, slice by
 * slice, since the last access. Nothing else advances it, neither a server nor a timer, so nothing runs while no
 * process accesses it. */
#include "timeline.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "node.h"

#define WINDOW_NS 1000000000ull
#define BUCKET_MASK ((1ull << FENKA_NODE_BUCKET_SHIFT) - 1)

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t sooner(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void bucket_add(uint64_t *bucket, uint64_t ordinal, uint64_t ns) {
    uint64_t seen = __atomic_load_n(bucket, __ATOMIC_RELAXED), wanted;
    do {
        uint64_t held = seen >> FENKA_NODE_BUCKET_SHIFT == ordinal ? seen & BUCKET_MASK : 0;
        wanted = ordinal << FENKA_NODE_BUCKET_SHIFT | sooner(held + ns, BUCKET_MASK);
    } while (!__atomic_compare_exchange_n(bucket, &seen, wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Distributes [from, to) over a ring of buckets, dropping what the ring cannot hold besides the last second. */
static void ring_add(uint64_t *ring, uint64_t count, uint64_t width, uint64_t from, uint64_t to) {
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

/* Sum over the last second; the bucket at its beginning counts in proportion. */
static uint64_t ring_sum(const uint64_t *ring, uint64_t count, uint64_t width, uint64_t now) {
    uint64_t from = now > WINDOW_NS ? now - WINDOW_NS : 0, sum = 0;
    for (uint64_t ordinal = from / width; ordinal <= now / width; ordinal++) {
        uint64_t word = __atomic_load_n(&ring[ordinal % count], __ATOMIC_RELAXED);
        if (word >> FENKA_NODE_BUCKET_SHIFT != ordinal)
            continue;
        uint64_t held = word & BUCKET_MASK, begin = ordinal * width;
        if (begin < from)
            held = held * (begin + width - from) / width;
        if (begin + width > now) /* queued work may be in the future */
            held = sooner(held, now - begin);
        sum += held;
    }
    return sooner(sum, WINDOW_NS);
}

/* ---- lanes: the time line of a card, or of an instance ---- */

/* The lane of a process: its instance, or 0 for the card. */
static uint32_t mark_of(uint32_t card, uint32_t slot) {
    uint32_t mark = __atomic_load_n(&node_state->processes[slot].instances[card], __ATOMIC_ACQUIRE);
    return mark < FENKA_NODE_LANES ? mark : 0;
}

static struct fenka_node_lane *lane_of(uint32_t card, uint32_t slot) {
    return &node_state->lanes[card][mark_of(card, slot)];
}

/* ---- a lane's lock ---- */

#define PATIENCE_NS 100000000ull
#define SLOT_MASK ((1ull << FENKA_NODE_LOCK_SHIFT) - 1)

static pthread_mutex_t own_threads = PTHREAD_MUTEX_INITIALIZER;

void timeline_after_fork(void) { own_threads = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static uint64_t own_word(void) { return node_generation << FENKA_NODE_LOCK_SHIFT | node_slot; }

static bool holder_is_gone(uint64_t word) {
    const struct fenka_node_process *process = &node_state->processes[word & SLOT_MASK];
    return __atomic_load_n(&process->generation, __ATOMIC_ACQUIRE) != word >> FENKA_NODE_LOCK_SHIFT ||
           __atomic_load_n(&process->ended, __ATOMIC_ACQUIRE);
}

/* False for a process without slot. The lock is taken over from a dead holder, and from one that has not moved for
 * long, because it may have been stopped; that one notices before its next step. */
static bool lock_lane(struct fenka_node_lane *lane) {
    if (!node_owns_slot())
        return false;
    pthread_mutex_lock(&own_threads);
    uint64_t begin = 0, seen = 0, stuck = 0;
    while (!__atomic_compare_exchange_n(&lane->lock, &seen, own_word(), false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        uint64_t now = node_now();
        if (seen != stuck)
            stuck = seen, begin = now;
        if (!holder_is_gone(seen) && now - begin < PATIENCE_NS) {
            sched_yield();
            seen = 0;
        }
    }
    return true;
}

static bool still_ours(const struct fenka_node_lane *lane) {
    return __atomic_load_n(&lane->lock, __ATOMIC_RELAXED) == own_word();
}

static void unlock_lane(struct fenka_node_lane *lane) {
    uint64_t ours = own_word();
    __atomic_compare_exchange_n(&lane->lock, &ours, 0, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&own_threads);
}

/* ---- turns ---- */

static uint64_t pending(const struct fenka_node_line *line) {
    uint64_t given = __atomic_load_n(&line->given, __ATOMIC_ACQUIRE);
    uint64_t served = __atomic_load_n(&line->served, __ATOMIC_ACQUIRE);
    return given > served ? given - served : 0;
}

/* The slots that have work on a lane, in the order of their turns, beginning with the current one. */
static unsigned waiting(uint32_t card, uint32_t mark, uint16_t *slots) {
    uint32_t used = __atomic_load_n(&node_state->slots_used, __ATOMIC_ACQUIRE);
    if (used > FENKA_NODE_SLOTS)
        used = FENKA_NODE_SLOTS;
    unsigned count = 0;
    uint64_t turn = node_state->lanes[card][mark].turn;
    for (uint32_t step = 0; step < used; step++) {
        uint32_t slot = (uint32_t)((turn + step) % used);
        if (pending(&node_state->lines[card][slot]) > 0 && mark_of(card, slot) == mark)
            slots[count++] = (uint16_t)slot;
    }
    return count;
}

static void remember(struct fenka_node_line *line, uint64_t from_ns, uint64_t run, uint64_t position) {
    uint64_t last = (line->turns + FENKA_NODE_TURNS - 1) % FENKA_NODE_TURNS;
    if (line->turns == 0 || line->turn_ns[last] != from_ns)
        last = line->turns++ % FENKA_NODE_TURNS;
    line->turn_position[last] = position;
    line->turn_ns[last] = from_ns + run;
}

static void serve(uint32_t card, uint32_t slot, uint64_t from_ns, uint64_t run) {
    struct fenka_node_line *line = &node_state->lines[card][slot];
    remember(line, from_ns, run, line->served + run);
    ring_add(node_state->busy[card][slot], FENKA_NODE_BUSY_BUCKETS, FENKA_NODE_BUSY_BUCKET_NS, from_ns, from_ns + run);
    __atomic_fetch_add(&node_state->processes[slot].busy_ns[card], run, __ATOMIC_RELAXED);
    __atomic_fetch_add(&line->served, run, __ATOMIC_RELEASE);
}

/* Under the lock: records the use of the process's lane until now. The clock is advanced first, so that a process that is
 * killed in between loses time and never adds any. */
static void advance(uint32_t index, uint32_t process, uint64_t now) {
    struct fenka_node_lane *lane = lane_of(index, process);
    uint16_t slots[FENKA_NODE_SLOTS];
    unsigned count = waiting(index, mark_of(index, process), slots), at = 0;
    uint64_t clock = lane->clock_ns;
    if (count > 0 && slots[0] != lane->turn)
        lane->turn_left_ns = FENKA_NODE_SLICE_NS;
    while (clock < now && count > 0 && still_ours(lane)) {
        uint32_t slot = slots[at];
        uint64_t rest = pending(&node_state->lines[index][slot]);
        uint64_t run = sooner(rest, now - clock);
        if (count > 1)
            run = sooner(run, lane->turn_left_ns);
        lane->turn = slot;
        __atomic_store_n(&lane->clock_ns, clock + run, __ATOMIC_RELEASE);
        lane->turn_left_ns -= sooner(run, lane->turn_left_ns);
        if (run > 0)
            serve(index, slot, clock, run);
        clock += run;
        bool done = run >= rest;
        if (done) {
            for (unsigned i = at + 1; i < count; i++)
                slots[i - 1] = slots[i];
            count--;
        }
        if (done || lane->turn_left_ns == 0) {
            at = count ? (done ? at : at + 1) % count : 0;
            lane->turn_left_ns = FENKA_NODE_SLICE_NS;
            if (count > 0)
                lane->turn = slots[at];
        }
    }
    if (clock < now && count == 0) {
        __atomic_store_n(&lane->clock_ns, now, __ATOMIC_RELEASE);
        ring_add(lane->idle, FENKA_NODE_IDLE_BUCKETS, FENKA_NODE_IDLE_BUCKET_NS, clock, now);
    }
}

uint64_t timeline_add(uint32_t card, uint64_t duration_ns) {
    struct fenka_node_lane *lane = lane_of(card, node_slot);
    if (!lock_lane(lane))
        return 0;
    advance(card, node_slot, node_now());
    uint64_t end = __atomic_add_fetch(&node_state->lines[card][node_slot].given, duration_ns, __ATOMIC_ACQ_REL);
    unlock_lane(lane);
    return end;
}

void timeline_settle(uint32_t card, uint32_t slot) {
    struct fenka_node_lane *lane = lane_of(card, slot);
    if (!lock_lane(lane))
        return;
    advance(card, slot, node_now());
    unlock_lane(lane);
}

struct timeline_place timeline_own(uint32_t card, uint64_t position) {
    return (struct timeline_place){card, node_slot, node_generation, position};
}

static bool is_past(struct timeline_place place) {
    const struct fenka_node_process *process = &node_state->processes[place.slot];
    return __atomic_load_n(&node_state->lines[place.card][place.slot].served, __ATOMIC_ACQUIRE) >= place.position ||
           __atomic_load_n(&process->generation, __ATOMIC_ACQUIRE) != place.generation;
}

/* The minimum of nanoseconds until the place is reached; 0 = it is. */
static uint64_t distance(struct timeline_place place) {
    struct fenka_node_lane *lane = lane_of(place.card, place.slot);
    if (is_past(place) || !lock_lane(lane))
        return 0;
    advance(place.card, place.slot, node_now());
    uint64_t least = 0;
    if (!is_past(place)) {
        const struct fenka_node_line *lines = node_state->lines[place.card];
        least = place.position - lines[place.slot].served;
        if (lane->turn != place.slot)
            least += sooner(lane->turn_left_ns, pending(&lines[lane->turn]));
    }
    unlock_lane(lane);
    return least;
}

bool timeline_reached(struct timeline_place place) { return distance(place) == 0; }

void timeline_wait(struct timeline_place place) {
    for (uint64_t least; (least = distance(place)) > 0;) {
        struct timespec rest = {.tv_sec = (time_t)(least / 1000000000), .tv_nsec = (long)(least % 1000000000)};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, NULL);
    }
}

uint64_t timeline_time_of(uint32_t card, uint64_t position) {
    struct fenka_node_lane *lane = lane_of(card, node_slot);
    const struct fenka_node_line *line = &node_state->lines[card][node_slot];
    uint64_t found = node_now();
    if (!lock_lane(lane))
        return found;
    uint64_t first = line->turns > FENKA_NODE_TURNS ? line->turns - FENKA_NODE_TURNS : 0;
    for (uint64_t turn = first; turn < line->turns; turn++) {
        uint64_t at = turn % FENKA_NODE_TURNS;
        if (line->turn_position[at] >= position) {
            found = line->turn_ns[at] - (line->turn_position[at] - position);
            break;
        }
    }
    unlock_lane(lane);
    return found;
}

/* ---- readers, which may have no slot and take no lock ---- */

static uint64_t unwritten(const struct fenka_node_lane *lane, uint64_t now) {
    uint64_t clock = __atomic_load_n(&lane->clock_ns, __ATOMIC_ACQUIRE);
    return now > clock ? now - clock : 0;
}

static uint64_t lane_busy(uint32_t card, uint32_t mark) {
    const struct fenka_node_lane *lane = &node_state->lanes[card][mark];
    uint16_t slots[FENKA_NODE_SLOTS];
    uint64_t now = node_now(), lag = unwritten(lane, now), work = 0;
    unsigned count = waiting(card, mark, slots);
    for (unsigned i = 0; i < count; i++)
        work += pending(&node_state->lines[card][slots[i]]);
    uint64_t idle = ring_sum(lane->idle, FENKA_NODE_IDLE_BUCKETS, FENKA_NODE_IDLE_BUCKET_NS, now);
    if (lag > work)
        idle += lag - work;
    return WINDOW_NS - sooner(idle, WINDOW_NS);
}

/* A card with instances is as busy as the busiest of them. */
uint64_t timeline_card_busy(uint32_t card) {
    uint32_t used = __atomic_load_n(&node_state->slots_used, __ATOMIC_ACQUIRE);
    uint64_t most = lane_busy(card, 0);
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++)
        if (mark_of(card, slot) != 0)
            most = later(most, lane_busy(card, mark_of(card, slot)));
    return most;
}

/* In the time that is not recorded yet, each process with work is assumed to have had its share. */
static uint64_t since_written(uint32_t card, uint32_t slot, uint64_t now) {
    uint16_t slots[FENKA_NODE_SLOTS];
    uint64_t lag = unwritten(lane_of(card, slot), now);
    unsigned count = waiting(card, mark_of(card, slot), slots);
    return sooner(pending(&node_state->lines[card][slot]), count ? lag / count : 0);
}

uint64_t timeline_process_total(uint32_t card, uint32_t slot) {
    uint64_t written = __atomic_load_n(&node_state->processes[slot].busy_ns[card], __ATOMIC_RELAXED);
    return written + since_written(card, slot, node_now());
}

uint64_t timeline_process_busy(uint32_t card, uint32_t slot) {
    uint64_t now = node_now(), since = since_written(card, slot, now);
    uint64_t written = ring_sum(node_state->busy[card][slot], FENKA_NODE_BUSY_BUCKETS, FENKA_NODE_BUSY_BUCKET_NS, now);
    return sooner(written + since, WINDOW_NS);
}
