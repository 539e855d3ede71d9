/* Events: the moment when what was given to a stream before them is done. */
#include <stdlib.h>

#include "driver.h"
#include "timeline.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Per card, those that were recorded before their time, first the earliest recorded. */
static CUevent unsettled[FENKA_NODE_CARDS], unsettled_last[FENKA_NODE_CARDS];

void events_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (int card = 0; card < FENKA_NODE_CARDS; card++)
        unsettled[card] = unsettled_last[card] = NULL;
}

/* Under the lock. */
static void unlist(CUevent event)
{
    uint32_t card = event->moment->place.card;
    if (!event->sooner && unsettled[card] != event)
        return;
    *(event->sooner ? &event->sooner->later : &unsettled[card]) = event->later;
    *(event->later ? &event->later->sooner : &unsettled_last[card]) = event->sooner;
    event->later = event->sooner = NULL;
}

/* Under the lock. */
static bool settle(CUevent event)
{
    struct moment *moment = event->moment;
    if (moment->at_ns != 0 || !moment->recorded)
        return true;
    if (!timeline_reached(moment->place))
        return false;
    if (moment->place.generation == node_generation)
        moment->at_ns = timeline_time_of(moment->place.card, moment->place.position);
    return true;
}

void events_settle(uint32_t card)
{
    if (!__atomic_load_n(&unsettled[card], __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&lock);
    while (unsettled[card] && settle(unsettled[card]))
        unlist(unsettled[card]);
    pthread_mutex_unlock(&lock);
}

static bool event_done(CUevent event)
{
    pthread_mutex_lock(&lock);
    bool done = settle(event);
    if (done && !event->imported)
        unlist(event);
    pthread_mutex_unlock(&lock);
    return done;
}

/* What is idle already is reached now and not when its last work was done. */
static void mark(CUevent event, uint32_t card, uint64_t position)
{
    struct timeline_place place = timeline_own(card, position);
    pthread_mutex_lock(&lock);
    unlist(event);
    bool idle = timeline_reached(place);
    event->moment->place = place;
    event->moment->at_ns = idle ? node_now() : 0;
    __atomic_store_n(&event->moment->recorded, 1, __ATOMIC_RELEASE);
    if (!idle) {
        event->sooner = unsettled_last[card];
        *(event->sooner ? &event->sooner->later : &unsettled[card]) = event;
        unsettled_last[card] = event;
    }
    pthread_mutex_unlock(&lock);
}

#define FLAGS (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)

CUresult event_from(CUevent *event, CUcontext context, struct moment *theirs)
{
    CUevent made = object_new(EVENT, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    made->imported = true;
    made->moment = theirs;
    *event = made;
    return CUDA_SUCCESS;
}

CUresult event_offset(CUevent event, off_t *offset)
{
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(event->flags & CU_EVENT_INTERPROCESS) || event->imported)
        return CUDA_ERROR_INVALID_HANDLE;
    *offset = event->offset;
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    CUcontext context;
    TRY(context_current(&context));
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (!event || flags & ~(unsigned)FLAGS || (shared && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent made = object_new(EVENT, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->moment = shared ? (struct moment *)arena_take(sizeof *made->moment, 0, &made->offset)
                          : &made->own;
    if (!made->moment) {
        object_delete(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made->moment = (struct moment){0};
    *event = made;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    if (!event->imported)
        unlist(event);
    pthread_mutex_unlock(&lock);
    if (event->imported)
        import_give_back((uintptr_t)event->moment, sizeof *event->moment);
    else if (event->flags & CU_EVENT_INTERPROCESS)
        arena_give_back((uintptr_t)event->moment, sizeof *event->moment, event->offset);
    free(event->tips.nodes);
    object_delete(event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
    CUcontext context;
    CUstream stream;
    (void)flags;
    TRY(stream_resolve(handle, &context, &stream));
    if (!object_get(event, EVENT) || event->object.context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (capture_record(event, stream))
        return CUDA_SUCCESS;
    mark(event, context->card, stream_end(context, stream));
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return cuEventRecordWithFlags(event, stream, 0);
}

CUresult cuEventQuery(CUevent event)
{
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (capture_knows(event))
        return CUDA_ERROR_CAPTURED_EVENT;
    return event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (capture_knows(event))
        return CUDA_ERROR_CAPTURED_EVENT;
    if (event->moment->recorded)
        timeline_wait(event->moment->place);
    events_settle(event->moment->place.card);
    pools_settle();
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    TRY(driver_ready());
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_get(start, EVENT) || !object_get(end, EVENT) || !start->moment->recorded ||
        !end->moment->recorded || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->moment->at_ns - start->moment->at_ns) / 1e6);
    return CUDA_SUCCESS;
}
