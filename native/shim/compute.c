/* The compute limit.
 *
 * A program gives a card work by launching; it cannot be interrupted, so the limit is held by making launches
 * wait. The lease has one account for each card, in the file that its processes share:
 *
 *   next_launch_at   The moment from which somebody may launch. A launch that costs c ns at a share s moves it on by
 *              c / s, and is made by whoever moved it. So the card's time is had at the rate s, whoever has it;
 *              several who wait cannot all go at once; and what is owed is never more than what one launch each
 *              has cost, also when the one who launched was killed. It is one word: there is nothing to lock.
 *              It lags behind the clock by BURST_NS at most, which makes up for sleeping too long and is all
 *              that an idle program may save. And it may lie ahead by AHEAD_NS: who wakes up late then finds that
 *              the card has had something to do.
 *
 * What a launch costs is measured (kernels.c), but of a sample of launches only, and by a clock on the stream
 * that also runs while other programs have the card. So the agent tells what the driver has measured of the
 * lease's processes (busy_ns in lease.h), late and in whole percents but not to be deceived, and somebody
 * compares:
 *
 *   excess     What was charged beyond what was measured. Every second a part of it is given back, or taken, by
 *              moving next_launch_at. As what is given back is subtracted, the long-term rate is that of the measured
 *              time exactly, whatever the estimates are worth; they only say who goes when. A launch that is
 *              charged but not executed is part of the excess until it is, hence only a part. Less than half a
 *              point of the time in between is not held against the estimates: so coarse are the percents.
 *
 *   scale      What estimates are multiplied by, so that little excess arises: kernels that were never seen but
 *              beside others look too long by the time that those had.
 *
 * Without readings (no agent, or a driver that measures no processes or does not know whose they are: MIG, MPS)
 * the estimates alone decide.
 *
 * Hard, soft, and weight differ in s only. For the latter two the agent tells how much may be had now; where it
 * has been silent, soft is held to its share, and weight not at all, for it is no limit. */
#include "compute.h"

#include "account.h"
#include "control.h"
#include "fenka/lease.h"
#include "launch_cost.h"
#include "os.h"

#define BURST_NS 100000000ull
#define AHEAD_NS 10000000ull
#define STEP_NS 5000000ull        /* no longer asleep than this without looking whether the limits have changed */
#define LEAST_STEP_NS 50000ull    /* at first: what was charged beforehand may be given back soon */
#define LEAST_FIRST_NS 5000000ull
#define MOST_FIRST_NS 100000000ull /* a kernel may wait for the next one to be launched */
#define SILENT_NS 1000000000ull   /* told so long ago, it is not known any more */
#define MOST_OWED_NS 86400000000000ull /* a later next_launch_at was scribbled by somebody */
#define COARSE 0.005
#define PER_SECOND 1.0 /* of the excess: slow against the age of readings, which may be half a second on real cards */
#define PATIENCE 2.0   /* seconds between two readings that can be compared */
#define FORGET 0.05    /* of what is recent, and as much of the ratio goes into the scale, with each reading */
#define SCALE_UNIT 65536.0
#define LEAST_SCALE 0.05
#define MOST_SCALE 4.0
#define MOST_EXCESS_NS 1e10 /* these three hold whatever a program has scribbled */

static bool fresh(const struct control_feedback *feedback, uint64_t now) {
    return now < feedback->at + SILENT_NS;
}

/* 1 = without limit. */
static double share_of(unsigned card, const struct control_feedback *feedback, uint64_t now) {
    double percent = control_percent(card) / 100.0, allowed = feedback->allowed / 10000.0;
    switch (control_mode(card)) {
    case FENKA_COMPUTE_SOFT:
        return feedback->feedback_seq && fresh(feedback, now) && allowed > percent ? allowed : percent;
    case FENKA_COMPUTE_WEIGHT:
        return feedback->feedback_seq && fresh(feedback, now) && allowed > 0 ? allowed : 1;
    default:
        return percent;
    }
}

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static bool swap(uint64_t *word, uint64_t seen, uint64_t next) {
    return __atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Where next_launch_at counts from: neither far behind the clock nor absurdly ahead. */
static uint64_t sensible(uint64_t ready, uint64_t now) {
    uint64_t oldest = now > BURST_NS ? now - BURST_NS : 0;
    return ready < oldest ? oldest : ready > now + MOST_OWED_NS ? now : ready;
}

static void move(struct fenka_compute_budget *on, double ns, uint64_t now) {
    for (;;) {
        uint64_t seen = load(&on->next_launch_at);
        double next = (double)sensible(seen, now) + ns;
        if (swap(&on->next_launch_at, seen, sensible(next > 0 ? (uint64_t)next : 0, now)))
            return;
    }
}

static double within(double value, double limit) {
    return value > limit ? limit : value < -limit ? -limit : value;
}

static double scale_of(const struct fenka_compute_budget *on) {
    double scale = (double)load(&on->scale) / SCALE_UNIT;
    return scale <= 0 ? 1 : scale < LEAST_SCALE ? LEAST_SCALE : scale > MOST_SCALE ? MOST_SCALE : scale;
}

static void rescale(struct fenka_compute_budget *on, int64_t busy, int64_t estimated) {
    double had = (double)load(&on->recent_busy) * (1 - FORGET) + (double)busy;
    double charged = (double)load(&on->recent_charged) * (1 - FORGET) + (double)estimated;
    store(&on->recent_busy, (uint64_t)had);
    store(&on->recent_charged, (uint64_t)charged);
    if (charged < 1e7 || had < 1e7) /* too little to tell */
        return;
    double step = 1 + FORGET * within(had / charged - 1, 1), next = scale_of(on) * step;
    store(&on->scale, (uint64_t)(next * SCALE_UNIT));
}

/* One of those who see a new reading compares; whom the kill hits in between has lost one comparison. */
static void compare(struct fenka_compute_budget *on, const struct control_feedback *feedback, double share, uint64_t now) {
    uint64_t seen = load(&on->feedback_seq);
    if (feedback->feedback_seq == seen || !swap(&on->feedback_seq, seen, feedback->feedback_seq))
        return;
    uint64_t charged = load(&on->charged), then = load(&on->feedback_at);
    double seconds = (double)(int64_t)(feedback->at - then) / 1e9;
    int64_t busy = (int64_t)(feedback->busy_ns - load(&on->last_busy_ns));
    int64_t estimated = (int64_t)(charged - load(&on->last_charged));
    bool follows = then && seconds > 0 && seconds < PATIENCE && busy >= 0 && estimated >= 0;
    /* Either nothing has run yet of what was charged, or the driver does not know whose work it is (as with MPS):
     * nothing measured is no reason to give all back. */
    if (follows && !busy)
        return;
    store(&on->feedback_at, feedback->at);
    store(&on->last_busy_ns, feedback->busy_ns);
    store(&on->last_charged, charged);
    if (follows)
        rescale(on, busy, estimated);
    double excess = 0;
    if (follows)
        excess = within((double)__atomic_load_n(&on->excess, __ATOMIC_RELAXED) + (double)estimated - (double)busy,
                        MOST_EXCESS_NS);
    excess -= within(excess, COARSE * seconds * 1e9);
    double part = share < 1 ? excess * within(PER_SECOND * seconds, 0.5) : excess;
    __atomic_store_n(&on->excess, (int64_t)(excess - part), __ATOMIC_RELAXED);
    if (share < 1)
        move(on, -part / share, now);
}

static uint64_t first_of(const struct fenka_compute_budget *on) {
    uint64_t first = load(&on->precharge_ns);
    return first < LEAST_FIRST_NS ? LEAST_FIRST_NS : first > MOST_FIRST_NS ? MOST_FIRST_NS : first;
}

uint64_t compute_precharge(unsigned card) {
    struct fenka_compute_budget *on = account_compute_budget(card);
    if (!on)
        return 0;
    uint64_t first = first_of(on);
    store(&on->precharge_ns, first * 2);
    return first;
}

void compute_precharge_end(unsigned card, const uint64_t *ns) {
    struct fenka_compute_budget *on = account_compute_budget(card);
    if (!on)
        return;
    uint64_t before = first_of(on) / 2;
    store(&on->precharge_ns, ns ? (before + (*ns < MOST_FIRST_NS ? *ns : MOST_FIRST_NS)) / 2 : before);
}

void throttle_wait(unsigned card, uint64_t cost) {
    struct fenka_compute_budget *on = account_compute_budget(card);
    uint64_t step = LEAST_STEP_NS;
    if (!on)
        return;
    for (;;) {
        struct control_feedback feedback = {0};
        uint64_t now = os_nanoseconds();
        if (!control_feedback(card, &feedback))
            feedback = (struct control_feedback){0};
        double share = share_of(card, &feedback, now);
        if (feedback.feedback_seq && fresh(&feedback, now))
            compare(on, &feedback, share, now);
        uint64_t seen = load(&on->next_launch_at), ready = sensible(seen, now);
        if (share < 1 && ready > now + AHEAD_NS) {
            os_sleep_until(ready - AHEAD_NS < now + step ? ready - AHEAD_NS : now + step);
            step = step * 2 < STEP_NS ? step * 2 : STEP_NS;
            launch_timings_poll();
            control_limits_compute(); /* takes in what has changed */
            continue;
        }
        /* Without a limit nothing is owed, nor is anything saved for a moment when there is one again. */
        double scaled = (double)cost * scale_of(on);
        uint64_t next = share < 1 ? ready + (uint64_t)(scaled / share) : now;
        if (!swap(&on->next_launch_at, seen, next))
            continue;
        __atomic_fetch_add(&on->charged, (uint64_t)scaled, __ATOMIC_RELAXED);
        return;
    }
}

void compute_adjust(unsigned card, int64_t cost) {
    struct fenka_compute_budget *on = account_compute_budget(card);
    struct control_feedback feedback = {0};
    uint64_t now = os_nanoseconds();
    if (!on)
        return;
    if (!control_feedback(card, &feedback))
        feedback = (struct control_feedback){0};
    double share = share_of(card, &feedback, now), scaled = (double)cost * scale_of(on);
    __atomic_fetch_add(&on->charged, (uint64_t)(int64_t)scaled, __ATOMIC_RELAXED);
    if (share < 1)
        move(on, scaled / share, now);
}
