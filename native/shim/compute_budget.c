/* The compute limit.
 *
 * A launch that has started cannot be interrupted, so the limit is enforced by delaying launches (throttle.c). Each
 * card has one budget in the account that the lease's processes share:
 *
 *   next_launch_at   The moment from which a process may launch. A launch of c ns at share s moves it forward by
 *              c / s, and belongs to the process whose compare-and-swap moved it. So the lease uses the card at rate
 *              s, and of several waiting processes one goes at a time. The debt never exceeds the cost of one launch
 *              per process, even if a process is killed. The state is one word, so there is nothing to lock.
 *              It may lag behind the clock by BURST_NS: this compensates for oversleeping and bounds what an idle
 *              program can save. It may be ahead by AHEAD_NS, so that the card has work while a process wakes up.
 *
 * The cost of a launch is measured (launch_timing.c) for a sample of launches, by events on the stream. That interval
 * also includes time in which other programs had the card. The agent therefore publishes what the driver has measured
 * for the lease's processes (busy_ns in lease.h). This feedback is late and in whole percents, but programs cannot
 * forge it. One process compares each reading with the charges:
 *
 *   excess     What was charged beyond what was measured. Every second a part of it is refunded, or charged, by moving
 *              next_launch_at. Refunds are subtracted from the excess, so the long-term rate follows the measured time
 *              whatever the quality of the estimates; those only decide the order. Launches that are charged but not
 *              yet executed are part of the excess, which is why only a part is refunded. Differences below half a
 *              percent of the interval are ignored, because readings are whole percents.
 *
 *   unclaimed  Of a long interval nothing is refunded: the agent may have missed readings. What was measured beyond the
 *              charges is charged at once: one launch has run all the time, and its process may have been killed
 *              before it could charge it. If it lives and does so, this much is refunded.
 *
 *   scale      The factor by which estimates are multiplied to keep the excess small. Kernels that were measured only
 *              beside other programs' work look too expensive.
 *
 * Without readings (no agent, or a driver that cannot attribute work to processes: MIG, MPS) only estimates count.
 *
 * Hard, soft and weight modes differ in s only. For soft and weight the agent publishes the share that is allowed now.
 * Without recent feedback, soft falls back to its guaranteed share, and weight (no limit) to the whole card.
 *
 * A lease that requested no compute is treated like a weight while others on the card have a share. Without them its
 * launches are neither charged nor measured, so readings from before yielding_since are not compared. */
#include "compute_budget.h"

#include "account.h"
#include "atomics.h"
#include "control.h"
#include "fenka/lease.h"
#include "os.h"

#define BURST_NS 100000000ull
#define AHEAD_NS 10000000ull
#define MIN_PRECHARGE_NS 5000000ull
#define MAX_PRECHARGE_NS 100000000ull /* a kernel may wait for the next one to be launched */
#define FEEDBACK_TTL_NS 1000000000ull
#define MAX_DEBT_NS 86400000000000ull /* a larger value can only be corruption by a program */
#define RESOLUTION 0.005              /* of the driver's readings */
#define REFUND_PER_S 1.0 /* of the excess: slow against the age of readings, which may be half a second on real cards */
#define MAX_INTERVAL_S 2.0 /* between two readings whose difference is refunded */
#define DECAY 0.05         /* of the recent sums at each reading; also the weight of the new ratio in the scale */
#define MIN_COMPARED_NS 1e7
#define SCALE_UNIT 65536.0
/* These bounds hold whatever a program has written into the account. */
#define MIN_SCALE 0.05
#define MAX_SCALE 4.0
#define MAX_EXCESS_NS 1e10

/* Feedback with feedback_seq 0 if there is none or it is too old. */
static struct control_feedback recent_feedback(unsigned card, uint64_t now) {
    struct control_feedback feedback;
    if (!control_feedback(card, &feedback) || now >= feedback.at + FEEDBACK_TTL_NS)
        feedback.feedback_seq = 0;
    return feedback;
}

/* 1 = without limit. */
static double allowed_share(unsigned card, const struct control_feedback *feedback) {
    double percent = control_percent(card) / 100.0;
    double allowed = feedback->feedback_seq ? feedback->allowed / 10000.0 : 0;
    switch (control_mode(card)) {
    case FENKA_COMPUTE_SOFT:
        return allowed > percent ? allowed : percent;
    case FENKA_COMPUTE_WEIGHT:
        return allowed > 0 ? allowed : 1;
    default:
        return percent < 1 || allowed <= 0 ? percent : allowed;
    }
}

/* Bounds next_launch_at: neither far behind the clock nor absurdly ahead. */
static uint64_t bounded(uint64_t launch_at, uint64_t now) {
    uint64_t oldest = now > BURST_NS ? now - BURST_NS : 0;
    return launch_at < oldest ? oldest : launch_at > now + MAX_DEBT_NS ? now : launch_at;
}

static void move_launch(struct fenka_compute_budget *budget, double ns, uint64_t now) {
    for (;;) {
        uint64_t seen = load_relaxed(&budget->next_launch_at);
        double next = (double)bounded(seen, now) + ns;
        if (swap_relaxed(&budget->next_launch_at, seen, bounded(next > 0 ? (uint64_t)next : 0, now)))
            return;
    }
}

static double within(double value, double limit) { return value > limit ? limit : value < -limit ? -limit : value; }

static double scale_of(const struct fenka_compute_budget *budget) {
    double scale = (double)load_relaxed(&budget->scale) / SCALE_UNIT;
    return scale <= 0 ? 1 : scale < MIN_SCALE ? MIN_SCALE : scale > MAX_SCALE ? MAX_SCALE : scale;
}

static void rescale(struct fenka_compute_budget *budget, int64_t measured, int64_t estimated) {
    double busy = (double)load_relaxed(&budget->recent_busy) * (1 - DECAY) + (double)measured;
    double charged = (double)load_relaxed(&budget->recent_charged) * (1 - DECAY) + (double)estimated;
    store_relaxed(&budget->recent_busy, (uint64_t)busy);
    store_relaxed(&budget->recent_charged, (uint64_t)charged);
    if (charged < MIN_COMPARED_NS || busy < MIN_COMPARED_NS)
        return;
    double step = 1 + DECAY * within(busy / charged - 1, 1), next = scale_of(budget) * step;
    store_relaxed(&budget->scale, (uint64_t)(next * SCALE_UNIT));
}

/* Refunds, or charges, a part of what the charges differ from the measurement. */
static void correct(struct fenka_compute_budget *budget, double difference, double seconds, double share,
                    uint64_t now) {
    double excess = within((double)__atomic_load_n(&budget->excess, __ATOMIC_RELAXED) + difference, MAX_EXCESS_NS);
    excess -= within(excess, RESOLUTION * seconds * 1e9);
    double part = share < 1 ? excess * within(REFUND_PER_S * seconds, 0.5) : excess;
    __atomic_store_n(&budget->excess, (int64_t)(excess - part), __ATOMIC_RELAXED);
    if (share < 1)
        move_launch(budget, -part / share, now);
}

static void charge_unclaimed(struct fenka_compute_budget *budget, double difference, double share, uint64_t now) {
    double unclaimed = within((double)load_relaxed(&budget->unclaimed_ns), MAX_DEBT_NS);
    double part = -difference < unclaimed ? -difference : unclaimed; /* negative: a charge */
    store_relaxed(&budget->unclaimed_ns, (uint64_t)within(unclaimed - part, MAX_DEBT_NS));
    if (share < 1)
        move_launch(budget, -part / share, now);
}

/* The process that swaps feedback_seq compares the reading. If it is killed in between, one comparison is lost. */
static void compare(struct fenka_compute_budget *budget, const struct control_feedback *feedback, double share,
                    uint64_t now) {
    uint64_t seen = load_relaxed(&budget->feedback_seq);
    if (feedback->feedback_seq == seen || !swap_relaxed(&budget->feedback_seq, seen, feedback->feedback_seq))
        return;
    uint64_t charged = load_relaxed(&budget->charged), last_at = load_relaxed(&budget->feedback_at);
    uint64_t generation = control_generation();
    double seconds = (double)(int64_t)(feedback->at - last_at) / 1e9;
    int64_t measured = (int64_t)(feedback->busy_ns - load_relaxed(&budget->last_busy_ns));
    int64_t estimated = (int64_t)(charged - load_relaxed(&budget->last_charged));
    /* Without an earlier comparison both began at zero with the lease, if its limits have always been these. */
    bool comparable = load_relaxed(&budget->generation) == generation && (last_at || !generation) &&
                      last_at >= control_yielding_since() && seconds > 0 && measured >= 0 && estimated >= 0;
    /* Zero measured means that nothing charged has run yet, or that the driver cannot attribute work (MPS).
     * Neither is a reason to refund everything. */
    if (comparable && !measured)
        return;
    store_relaxed(&budget->feedback_at, feedback->at);
    store_relaxed(&budget->last_busy_ns, feedback->busy_ns);
    store_relaxed(&budget->last_charged, charged);
    store_relaxed(&budget->generation, generation);
    if (comparable && seconds >= MAX_INTERVAL_S) {
        charge_unclaimed(budget, (double)measured - (double)estimated, share, now);
    } else if (comparable) {
        rescale(budget, measured, estimated);
        correct(budget, (double)estimated - (double)measured, seconds, share, now);
    } else {
        __atomic_store_n(&budget->excess, 0, __ATOMIC_RELAXED);
    }
}

uint64_t compute_budget_take(unsigned card, uint64_t cost) {
    struct fenka_compute_budget *budget = account_compute_budget(card);
    while (budget) {
        uint64_t now = os_nanoseconds();
        struct control_feedback feedback = recent_feedback(card, now);
        double share = allowed_share(card, &feedback);
        if (feedback.feedback_seq)
            compare(budget, &feedback, share, now);
        double scaled = (double)cost * scale_of(budget);
        uint64_t seen = load_relaxed(&budget->next_launch_at), launch_at = bounded(seen, now);
        if (share < 1 && launch_at > now + AHEAD_NS)
            return launch_at - AHEAD_NS;
        /* Without a limit there is neither debt nor credit for a limit that comes later. */
        if (!swap_relaxed(&budget->next_launch_at, seen, share < 1 ? launch_at + (uint64_t)(scaled / share) : now))
            continue;
        __atomic_fetch_add(&budget->charged, (uint64_t)scaled, __ATOMIC_RELAXED);
        break;
    }
    return 0;
}

void compute_budget_count_wait(unsigned card, uint64_t ns) {
    struct fenka_compute_budget *budget = account_compute_budget(card);
    if (budget)
        __atomic_fetch_add(&budget->throttled_ns, ns, __ATOMIC_RELAXED);
}

void compute_budget_adjust(unsigned card, int64_t cost) {
    struct fenka_compute_budget *budget = account_compute_budget(card);
    if (!budget)
        return;
    uint64_t now = os_nanoseconds();
    struct control_feedback feedback = recent_feedback(card, now);
    double share = allowed_share(card, &feedback), scaled = (double)cost * scale_of(budget);
    __atomic_fetch_add(&budget->charged, (uint64_t)(int64_t)scaled, __ATOMIC_RELAXED);
    if (share < 1)
        move_launch(budget, scaled / share, now);
}

static uint64_t bounded_precharge(const struct fenka_compute_budget *budget) {
    uint64_t ns = load_relaxed(&budget->precharge_ns);
    return ns < MIN_PRECHARGE_NS ? MIN_PRECHARGE_NS : ns > MAX_PRECHARGE_NS ? MAX_PRECHARGE_NS : ns;
}

uint64_t compute_precharge(unsigned card) {
    struct fenka_compute_budget *budget = account_compute_budget(card);
    if (!budget)
        return 0;
    uint64_t ns = bounded_precharge(budget);
    store_relaxed(&budget->precharge_ns, ns * 2);
    return ns;
}

void compute_precharge_end(unsigned card, const uint64_t *ns) {
    struct fenka_compute_budget *budget = account_compute_budget(card);
    if (!budget)
        return;
    uint64_t before = bounded_precharge(budget) / 2;
    uint64_t measured = !ns ? before : *ns < MAX_PRECHARGE_NS ? *ns : MAX_PRECHARGE_NS;
    store_relaxed(&budget->precharge_ns, (before + measured) / 2);
}
