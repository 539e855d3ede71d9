/* Decides for each launch what it is charged and whether it is measured.
 *
 * After the first few launches of some work only so many are measured that measuring costs about a hundredth of the
 * work. Small costs are summed by thread and charged to the budget together. No launch waits for a measurement, with
 * one exception: while the first launch of unknown work is measured (it has been precharged), a second launch of the
 * same work waits for the result. It waits FIRST_WAIT_NS at most, because a kernel may wait for a later launch.
 *
 * Nothing here is locked; of two threads that share a slot one may lose a little of its sum. */
#include "launch_cost.h"

#include <string.h>

#include "atomics.h"
#include "compute_budget.h"
#include "control.h"
#include "cost_table.h"
#include "fenka/lease.h"
#include "launch_timing.h"
#include "os.h"
#include "target.h"
#include "throttle.h"

#define BATCH_NS 100000           /* charged to the budget at once */
#define BATCH_LAUNCHES 1024       /* or after this many launches that cost nothing */
#define WORK_PER_TIMING_NS 300000 /* a measurement costs some 3 µs */
#define MAX_TIMING_INTERVAL 1024  /* launches */
#define RETRY_INTERVAL 64         /* launches, after one that could not be measured */
#define ALWAYS_TIMED_NS 1000      /* the first launches of work that costs more are all measured */
#define FIRST_WAIT_NS 100000000ull
#define FIRST_STEP_NS 20000
#define MAX_STEP_NS 1000000
#define THREAD_SLOTS 32
#define CACHED 64 /* a power of two */

/* A thread's copy of recently used costs, and what it has not charged to the budget yet. */
struct thread_slot {
    int64_t pending[FENKA_MAX_CARDS];
    uint32_t launches;
    struct {
        uint64_t key, cost;
        uint32_t until_timed;
    } cached[CACHED];
} __attribute__((aligned(64)));

static struct thread_slot slots[THREAD_SLOTS];
static uint32_t slots_assigned;
static __thread uint32_t own_slot; /* index + 1; 0 = not assigned yet */

/* With more threads than slots, some threads share one. */
static struct thread_slot *thread_slot(void) {
    if (__builtin_expect(!own_slot, 0))
        own_slot = __atomic_fetch_add(&slots_assigned, 1, __ATOMIC_RELAXED) % THREAD_SLOTS + 1;
    return &slots[own_slot - 1];
}

void launch_cost_reset(void) { memset(slots, 0, sizeof slots); }

static bool captures(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!HAS(cuStreamIsCapturing))
        return false;
    return REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Waits for the first measurement. Returns the cost, or COST_UNKNOWN if no measurement is in progress. */
static uint64_t await_first(struct cost_entry *entry) {
    for (uint64_t step = FIRST_STEP_NS;; step = step < MAX_STEP_NS ? step * 2 : step) {
        uint64_t cost = load_relaxed(&entry->cost), first = load_relaxed(&entry->first_started_at);
        uint64_t now = os_nanoseconds();
        if (cost != COST_UNKNOWN || !first)
            return cost;
        if (now - first > FIRST_WAIT_NS) {
            swap_relaxed(&entry->cost, cost, now - first);
            return now - first;
        }
        os_sleep_until(now + step);
        launch_timings_poll();
    }
}

static uint32_t timing_interval(const struct cost_entry *entry, uint64_t cost) {
    if (entry->samples < COST_RECENT && load_relaxed(&entry->cost) > ALWAYS_TIMED_NS)
        return 1;
    uint64_t launches = cost ? WORK_PER_TIMING_NS / cost + 1 : MAX_TIMING_INTERVAL;
    return launches < MAX_TIMING_INTERVAL ? (uint32_t)launches : MAX_TIMING_INTERVAL;
}

static void cache(struct thread_slot *slot, uint64_t key, uint64_t cost, uint32_t until_timed) {
    unsigned i = key & (CACHED - 1);
    slot->cached[i].key = key;
    slot->cached[i].cost = cost;
    slot->cached[i].until_timed = until_timed;
}

/* A launch that is measured, or whose cost this thread does not know. */
__attribute__((noinline, cold)) static void begin_timed(struct launch *launch, struct thread_slot *slot, uint64_t key,
                                                        CUstream stream) {
    struct cost_entry *entry = cost_table_entry(key);
    launch_timings_poll();
    uint64_t cost = await_first(entry);
    bool first = cost == COST_UNKNOWN;
    launch->cost = first ? compute_precharge(launch->card) : cost;
    throttle_wait(launch->card, launch->cost);
    launch->charged = true;
    if (!first)
        cache(slot, key, cost, timing_interval(entry, cost));
    const struct launch_timing_subject subject = {entry, key, launch->cost, launch->card, first};
    launch->timing = captures(stream) ? NULL : launch_timing_begin(stream, &subject);
    launch->unknown_cost = first ? entry : NULL;
    if (!first)
        return;
    if (launch->timing) {
        slot->cached[key & (CACHED - 1)].key = 0;
        store_relaxed(&entry->first_started_at, os_nanoseconds());
        return;
    }
    compute_precharge_end(launch->card, NULL);
    compute_budget_adjust(launch->card, -(int64_t)launch->cost);
    launch->cost = 0;
    cache(slot, key, 0, RETRY_INTERVAL);
}

static bool find_card(struct launch *launch, CUstream stream) {
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

void launch_begin(struct launch *launch, uint64_t key, CUstream stream) {
    launch->timing = NULL;
    launch->charged = false;
    launch->cost = 0;
    /* Captured work is charged when its graph is launched. The default stream is never captured. */
    if (!find_card(launch, stream) || (stream && captures(stream)))
        return;
    struct thread_slot *slot = thread_slot();
    unsigned i = key & (CACHED - 1);
    if (__builtin_expect(slot->cached[i].key != key || --slot->cached[i].until_timed == 0, 0)) {
        begin_timed(launch, slot, key, stream);
        return;
    }
    launch->cost = slot->cached[i].cost;
    int64_t pending = slot->pending[launch->card] += (int64_t)launch->cost;
    if (__builtin_expect(pending >= BATCH_NS || ++slot->launches % BATCH_LAUNCHES == 0, 0)) {
        slot->pending[launch->card] = 0;
        throttle_wait(launch->card, pending > 0 ? (uint64_t)pending : 0);
        launch_timings_poll();
    }
}

static void refund(const struct launch *launch) {
    if (launch->charged)
        compute_budget_adjust(launch->card, -(int64_t)launch->cost);
    else
        thread_slot()->pending[launch->card] -= (int64_t)launch->cost;
}

__attribute__((noinline, cold)) static void end_timed(struct launch *launch, CUresult result, CUstream stream) {
    if (launch_timing_end(launch->timing, result, stream) || !launch->unknown_cost)
        return;
    store_relaxed(&launch->unknown_cost->first_started_at, 0);
    compute_precharge_end(launch->card, NULL);
    if (result == CUDA_SUCCESS)
        refund(launch);
}

CUresult launch_end(struct launch *launch, CUresult result, CUstream stream) {
    if (__builtin_expect(result != CUDA_SUCCESS && launch->cost, 0))
        refund(launch);
    if (__builtin_expect(launch->timing != NULL, 0))
        end_timed(launch, result, stream);
    return result;
}
