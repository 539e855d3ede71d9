/* An event before and after a launch cost the program some microseconds, so only a sample of launches is measured
 * (launch_cost.c). Slots are claimed by compare-and-swap; if none is free, the launch is not measured. */
#include "launch_timing.h"

#include <string.h>

#include "atomics.h"
#include "compute_budget.h"
#include "context_state.h"

#define TIMINGS 64

enum { FREE, CLAIMED, RUNNING };

struct launch_timing {
    uint32_t state, deaths;
    CUcontext context; /* that owns the events; NULL = there are no events */
    CUevent begin, end;
    struct launch_timing_subject subject;
};

static struct launch_timing timings[TIMINGS];
static uint32_t running;

void launch_timings_reset(void) {
    memset(timings, 0, sizeof timings);
    running = 0;
}

static bool claim(struct launch_timing *timing, uint32_t state) {
    return __atomic_compare_exchange_n(&timing->state, &state, CLAIMED, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static void release(struct launch_timing *timing, bool events_lost) {
    if (events_lost)
        timing->context = NULL;
    __atomic_store_n(&timing->state, FREE, __ATOMIC_RELEASE);
}

/* Event calls would otherwise fail while another thread captures in the default mode. */
struct capture_mode {
    CUstreamCaptureMode mode;
    bool exchanged;
};

static struct capture_mode relax_capture_mode(void) {
    struct capture_mode previous = {CU_STREAM_CAPTURE_MODE_RELAXED, false};
    previous.exchanged = HAS(cuThreadExchangeStreamCaptureMode) &&
                         REAL(cuThreadExchangeStreamCaptureMode)(&previous.mode) == CUDA_SUCCESS;
    return previous;
}

static void restore_capture_mode(struct capture_mode *previous) {
    if (previous->exchanged)
        REAL(cuThreadExchangeStreamCaptureMode)(&previous->mode);
}

static bool ensure_events(struct launch_timing *timing, CUcontext context, uint32_t deaths) {
    if (timing->context && timing->deaths == deaths) {
        if (timing->context == context)
            return true;
        REAL(cuEventDestroy_v2)(timing->begin);
        REAL(cuEventDestroy_v2)(timing->end);
    }
    timing->context = NULL;
    if (REAL(cuEventCreate)(&timing->begin, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return false;
    if (REAL(cuEventCreate)(&timing->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        REAL(cuEventDestroy_v2)(timing->begin);
        return false;
    }
    timing->context = context;
    timing->deaths = deaths;
    return true;
}

/* Prefers a slot that has events of this context. */
static struct launch_timing *claim_free(CUcontext context) {
    struct launch_timing *other = NULL;
    for (unsigned i = 0; i < TIMINGS; i++) {
        struct launch_timing *timing = &timings[i];
        if (__atomic_load_n(&timing->state, __ATOMIC_RELAXED) != FREE)
            continue;
        if (timing->context == context && claim(timing, FREE))
            return timing;
        other = other ? other : timing;
    }
    return other && claim(other, FREE) ? other : NULL;
}

struct launch_timing *launch_timing_begin(CUstream stream, const struct launch_timing_subject *subject) {
    CUcontext context = NULL;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context)
        return NULL;
    struct launch_timing *timing = claim_free(context);
    if (!timing)
        return NULL;
    struct capture_mode previous = relax_capture_mode();
    bool begun = ensure_events(timing, context, deaths) && REAL(cuEventRecord)(timing->begin, stream) == CUDA_SUCCESS;
    restore_capture_mode(&previous);
    if (!begun) {
        release(timing, false);
        return NULL;
    }
    timing->subject = *subject;
    return timing;
}

bool launch_timing_end(struct launch_timing *timing, CUresult result, CUstream stream) {
    if (result == CUDA_SUCCESS && REAL(cuEventRecord)(timing->end, stream) == CUDA_SUCCESS) {
        __atomic_fetch_add(&running, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&timing->state, RUNNING, __ATOMIC_RELEASE);
        return true;
    }
    release(timing, false);
    return false;
}

static void commit(const struct launch_timing_subject *subject, float milliseconds) {
    uint64_t ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
    if (cost_table_add(subject->entry, subject->key, ns) && subject->precharged)
        store_relaxed(&subject->entry->first_started_at, 0);
    if (subject->precharged) {
        compute_precharge_end(subject->card, &ns);
        compute_budget_adjust(subject->card, (int64_t)ns - (int64_t)subject->charged);
    }
}

static void poll(struct launch_timing *timing, uint32_t deaths) {
    float milliseconds = 0;
    bool lost = timing->deaths != deaths;
    CUresult result = lost ? CUDA_SUCCESS : REAL(cuEventQuery)(timing->end);
    if (result == CUDA_ERROR_NOT_READY) {
        __atomic_store_n(&timing->state, RUNNING, __ATOMIC_RELEASE);
        return;
    }
    if (lost) {
        if (timing->subject.precharged)
            compute_precharge_end(timing->subject.card, NULL);
    } else {
        if (result == CUDA_SUCCESS)
            result = REAL(cuEventElapsedTime)(&milliseconds, timing->begin, timing->end);
        if (result == CUDA_SUCCESS)
            commit(&timing->subject, milliseconds);
    }
    __atomic_fetch_sub(&running, 1, __ATOMIC_RELAXED);
    release(timing, lost || result != CUDA_SUCCESS);
}

void launch_timings_poll(void) {
    if (!__atomic_load_n(&running, __ATOMIC_RELAXED))
        return;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    struct capture_mode previous = relax_capture_mode();
    for (unsigned i = 0; i < TIMINGS; i++)
        if (__atomic_load_n(&timings[i].state, __ATOMIC_RELAXED) == RUNNING && claim(&timings[i], RUNNING))
            poll(&timings[i], deaths);
    restore_capture_mode(&previous);
}
