/* An event before a launch and one behind it tell how long it took. That costs the program some microseconds,
 * so after the first few launches of some work only so many are measured that it is a hundredth of the work.
 *
 * The interval is too long when other programs, or other streams, had the card in it: so the least of the last
 * few is what counts. It is never waited for, but for the first launch of what was never measured: that one is
 * charged beforehand what such launches have cost of late (compute.h), and a second one waits for its end, at most
 * FIRST_NS long, for a kernel may wait for another one to be launched.
 *
 * Work that costs little is added up, by thread, and taken from the lease's account together. Nothing here is
 * locked: what threads share is atomic, and of two that meet in the same place one goes without. */
#include "launch_cost.h"

#include <string.h>

#include "charge.h"
#include "compute.h"
#include "hook_context.h"
#include "control.h"
#include "fenka/lease.h"
#include "os.h"

#define TOGETHER_NS 100000   /* taken from the account at once */
#define TOGETHER_TIMES 1024  /* or after so many launches, of what costs nothing */
#define MEASURING_NS 300000  /* of work to one measurement: some 3 µs */
#define SELDOM 1024          /* launches to one measurement, at most */
#define FIRST_NS 100000000ull
#define RECENT 8
#define KNOWN 4096           /* a power of two */
#define PROBES 8
#define MEASURES 64
#define LANES 32
#define CACHED 64            /* a power of two */
#define UNKNOWN UINT64_MAX

/* Work that is known, in a table of the process. */
struct known {
    uint64_t work; /* 0 = none */
    uint64_t cost; /* ns; UNKNOWN until measured */
    uint64_t first_at; /* when the first measurement began; 0 = none is under way */
    uint32_t times;
    uint32_t recent[RECENT]; /* 100 ns */
};

enum { FREE, TAKEN, RUNNING };

struct launch_timing {
    uint32_t state, deaths;
    CUcontext context; /* whose the events are; NULL = there are none */
    CUevent begin, end;
    struct known *known;
    uint64_t work, charged;
    uint8_t card;
    bool first; /* charged beforehand, for want of anything better */
};

/* What a thread remembers of the table, and what it has yet to take from the account. Threads have lanes in turn;
 * where there are more threads than lanes, two may spoil each other's sums a little. */
struct lane {
    int64_t together[FENKA_MAX_CARDS];
    uint32_t times;
    struct {
        uint64_t work, cost;
        uint32_t until_measured;
    } cached[CACHED];
} __attribute__((aligned(64)));

static struct known table[KNOWN];
static struct launch_timing measures[MEASURES];
static uint32_t running;
static struct lane lanes[LANES];
static uint32_t lanes_given;
static __thread uint32_t own_lane; /* 0 = none yet */

static struct lane *lane_of_thread(void) {
    if (__builtin_expect(!own_lane, 0))
        own_lane = __atomic_fetch_add(&lanes_given, 1, __ATOMIC_RELAXED) % LANES + 1;
    return &lanes[own_lane - 1];
}

void launch_cost_reset(void) {
    memset(table, 0, sizeof table);
    memset(measures, 0, sizeof measures);
    memset(lanes, 0, sizeof lanes);
    running = 0;
}

static bool swap32(uint32_t *word, uint32_t seen, uint32_t next) {
    return __atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* ---- the table ---- */

/* A full neighbourhood gives up its first place. */
static struct known *known_of(uint64_t work) {
    uint64_t home = work >> 20;
    for (unsigned probe = 0; probe <= PROBES; probe++) {
        struct known *known = &table[(home + probe % PROBES) & (KNOWN - 1)];
        uint64_t seen = load(&known->work);
        if (seen == work)
            return known;
        if (seen && probe < PROBES)
            continue;
        store(&known->cost, UNKNOWN);
        store(&known->first_at, 0);
        known->times = 0;
        if (__atomic_compare_exchange_n(&known->work, &seen, work, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED) ||
            seen == work)
            return known;
    }
    return &table[home & (KNOWN - 1)];
}

void launch_cost_invalidate(uint64_t work) {
    struct known *known = known_of(work);
    store(&known->cost, UNKNOWN);
    known->times = 0;
}

static void learn(struct known *known, uint64_t ns) {
    uint32_t times = __atomic_fetch_add(&known->times, 1, __ATOMIC_RELAXED), least = UINT32_MAX;
    uint64_t coarse = ns / 100;
    __atomic_store_n(&known->recent[times % RECENT], coarse < UINT32_MAX ? (uint32_t)coarse : UINT32_MAX,
                     __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < RECENT && i <= times; i++) {
        uint32_t one = __atomic_load_n(&known->recent[i], __ATOMIC_RELAXED);
        least = one < least ? one : least;
    }
    store(&known->cost, (uint64_t)least * 100);
}

/* ---- measuring ---- */

/* Around calls that a capture in another thread would forbid. */
struct relaxed {
    CUstreamCaptureMode mode;
    bool entered;
};

static struct relaxed relax(void) {
    struct relaxed before = {CU_STREAM_CAPTURE_MODE_RELAXED, false};
    before.entered = HAS(cuThreadExchangeStreamCaptureMode) &&
                     REAL(cuThreadExchangeStreamCaptureMode)(&before.mode) == CUDA_SUCCESS;
    return before;
}

static void restore(struct relaxed *before) {
    if (before->entered)
        REAL(cuThreadExchangeStreamCaptureMode)(&before->mode);
}

static void let_go(struct launch_timing *measure, bool lost) {
    if (lost)
        measure->context = NULL;
    __atomic_store_n(&measure->state, FREE, __ATOMIC_RELEASE);
}

static bool has_events(struct launch_timing *measure, CUcontext context, uint32_t deaths) {
    if (measure->context && measure->deaths == deaths) {
        if (measure->context == context)
            return true;
        REAL(cuEventDestroy_v2)(measure->begin);
        REAL(cuEventDestroy_v2)(measure->end);
    }
    measure->context = NULL;
    if (REAL(cuEventCreate)(&measure->begin, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return false;
    if (REAL(cuEventCreate)(&measure->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        REAL(cuEventDestroy_v2)(measure->begin);
        return false;
    }
    measure->context = context;
    measure->deaths = deaths;
    return true;
}

static struct launch_timing *free_measure(CUcontext context) {
    struct launch_timing *other = NULL;
    for (unsigned i = 0; i < MEASURES; i++) {
        struct launch_timing *one = &measures[i];
        if (__atomic_load_n(&one->state, __ATOMIC_RELAXED) != FREE)
            continue;
        if (one->context == context && swap32(&one->state, FREE, TAKEN))
            return one;
        other = other ? other : one;
    }
    return other && swap32(&other->state, FREE, TAKEN) ? other : NULL;
}

static struct launch_timing *begin_measure(CUstream stream) {
    CUcontext context = NULL;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context)
        return NULL;
    struct launch_timing *measure = free_measure(context);
    if (!measure)
        return NULL;
    struct relaxed before = relax();
    bool begun = has_events(measure, context, deaths) && REAL(cuEventRecord)(measure->begin, stream) == CUDA_SUCCESS;
    restore(&before);
    if (!begun)
        let_go(measure, false);
    return begun ? measure : NULL;
}

/* Once measured, the launch that was made unknown is paid for, and what was charged too much is given back. */
static void settle_measure(struct launch_timing *measure, float milliseconds) {
    uint64_t ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
    struct known *known = measure->known;
    bool first = measure->first;
    if (load(&known->work) == measure->work) {
        learn(known, ns);
        if (first)
            store(&known->first_at, 0);
    }
    if (first) {
        compute_precharge_end(measure->card, &ns);
        compute_adjust(measure->card, (int64_t)ns - (int64_t)measure->charged);
    }
}

static void look_at(struct launch_timing *measure, uint32_t deaths) {
    float milliseconds = 0;
    if (measure->deaths != deaths) {
        if (measure->first)
            compute_precharge_end(measure->card, NULL);
        __atomic_fetch_sub(&running, 1, __ATOMIC_RELAXED);
        let_go(measure, true);
        return;
    }
    CUresult result = REAL(cuEventQuery)(measure->end);
    if (result == CUDA_ERROR_NOT_READY) {
        __atomic_store_n(&measure->state, RUNNING, __ATOMIC_RELEASE);
        return;
    }
    if (result == CUDA_SUCCESS)
        result = REAL(cuEventElapsedTime)(&milliseconds, measure->begin, measure->end);
    if (result == CUDA_SUCCESS)
        settle_measure(measure, milliseconds);
    __atomic_fetch_sub(&running, 1, __ATOMIC_RELAXED);
    let_go(measure, result != CUDA_SUCCESS);
}

void launch_timings_poll(void) {
    if (!__atomic_load_n(&running, __ATOMIC_RELAXED))
        return;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    struct relaxed before = relax();
    for (unsigned i = 0; i < MEASURES; i++)
        if (__atomic_load_n(&measures[i].state, __ATOMIC_RELAXED) == RUNNING &&
            swap32(&measures[i].state, RUNNING, TAKEN))
            look_at(&measures[i], deaths);
    restore(&before);
}

/* ---- launching ---- */

static bool captures(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!HAS(cuStreamIsCapturing))
        return false;
    return REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Until its first launch is measured, or so long that it may be waiting for this one. */
static uint64_t await_first(struct known *known) {
    for (uint64_t step = 20000;; step = step < 1000000 ? step * 2 : step) {
        uint64_t cost = load(&known->cost), first = load(&known->first_at), now = os_nanoseconds();
        if (cost != UNKNOWN || !first)
            return cost;
        if (now - first > FIRST_NS) {
            __atomic_compare_exchange_n(&known->cost, &cost, now - first, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
            return now - first;
        }
        os_sleep_until(now + step);
        launch_timings_poll();
    }
}

static uint32_t measured_every(uint64_t cost) {
    uint64_t launches = cost ? MEASURING_NS / cost + 1 : SELDOM;
    return launches < SELDOM ? (uint32_t)launches : SELDOM;
}

__attribute__((noinline, cold)) static void begin_slowly(struct launch *launch, struct lane *lane, uint64_t work,
                                                         CUstream stream) {
    struct known *known = known_of(work);
    launch_timings_poll();
    uint64_t cost = await_first(known);
    bool first = cost == UNKNOWN;
    launch->cost = first ? compute_precharge(launch->card) : cost;
    throttle_wait(launch->card, launch->cost);
    launch->charged = true;
    unsigned target = work & (CACHED - 1);
    uint32_t few = known->times < RECENT && load(&known->cost) > 1000;
    lane->cached[target].work = first ? 0 : work;
    lane->cached[target].cost = first ? 0 : cost;
    lane->cached[target].until_measured = few ? 1 : measured_every(lane->cached[target].cost);
    launch->measure = captures(stream) ? NULL : begin_measure(stream);
    if (launch->measure) {
        launch->measure->known = known;
        launch->measure->work = work;
        launch->measure->card = launch->card;
        launch->measure->charged = launch->cost;
        launch->measure->first = first;
        if (first)
            store(&known->first_at, os_nanoseconds());
    } else if (first) { /* it cannot be measured now: perhaps later */
        compute_precharge_end(launch->card, NULL);
        compute_adjust(launch->card, -(int64_t)launch->cost);
        launch->cost = 0;
        lane->cached[target].work = work;
        lane->cached[target].until_measured = SELDOM / 16;
    }
}

static bool target_launch(struct launch *launch, CUstream stream) {
    struct target target;
    if (__builtin_expect(control_cards() == 1, 1)) {
        launch->card = 0;
        return true;
    }
    if (target_stream(&target, stream) != CUDA_SUCCESS || target.card == NO_CARD)
        return false;
    launch->card = target.card;
    return true;
}

void launch_begin(struct launch *launch, uint64_t work, CUstream stream) {
    launch->measure = NULL;
    launch->charged = false;
    launch->cost = 0;
    /* What becomes part of a graph is paid for when that is launched. The default stream is never captured. */
    if (!target_launch(launch, stream) || (stream && captures(stream)))
        return;
    struct lane *lane = lane_of_thread();
    unsigned target = work & (CACHED - 1);
    if (__builtin_expect(lane->cached[target].work != work || --lane->cached[target].until_measured == 0, 0)) {
        begin_slowly(launch, lane, work, stream);
        return;
    }
    launch->cost = lane->cached[target].cost;
    int64_t together = lane->together[launch->card] += (int64_t)launch->cost;
    if (__builtin_expect(together >= TOGETHER_NS || ++lane->times % TOGETHER_TIMES == 0, 0)) {
        lane->together[launch->card] = 0;
        throttle_wait(launch->card, together > 0 ? (uint64_t)together : 0);
        launch_timings_poll();
    }
}

CUresult launch_end(struct launch *launch, CUresult result, CUstream stream) {
    struct launch_timing *measure = launch->measure;
    if (__builtin_expect(result != CUDA_SUCCESS && launch->cost, 0)) {
        if (launch->charged)
            compute_adjust(launch->card, -(int64_t)launch->cost);
        else
            lane_of_thread()->together[launch->card] -= (int64_t)launch->cost;
    }
    if (__builtin_expect(!measure, 1))
        return result;
    if (result == CUDA_SUCCESS && REAL(cuEventRecord)(measure->end, stream) == CUDA_SUCCESS) {
        __atomic_fetch_add(&running, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&measure->state, RUNNING, __ATOMIC_RELEASE);
        return result;
    }
    if (measure->first) {
        store(&measure->known->first_at, 0);
        compute_precharge_end(launch->card, NULL);
        if (result == CUDA_SUCCESS)
            compute_adjust(launch->card, -(int64_t)launch->cost);
    }
    let_go(measure, false);
    return result;
}
