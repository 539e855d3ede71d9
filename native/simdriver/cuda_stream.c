/* Streams. A stream is no queue: it is the position on the card's line of what was given to it last. */
#include "driver.h"
#include "timeline.h"

static uint64_t last_id;

/* ---- the thread's own streams, one per context ---- */

static __thread CUstream own_streams;
static pthread_key_t thread_end;
static pthread_once_t thread_end_made = PTHREAD_ONCE_INIT;

static void forget_own(void *first)
{
    for (CUstream stream = first, next; stream; stream = next) {
        next = stream->sibling;
        object_delete(stream);
    }
}

static void make_thread_end(void) { pthread_key_create(&thread_end, forget_own); }

static CUstream stream_of_thread(CUcontext context)
{
    for (CUstream stream = own_streams; stream; stream = stream->sibling)
        if (stream->object.context == context && object_get(stream, STREAM))
            return stream;
    CUstream made = object_new(STREAM, sizeof *made, context);
    if (!made)
        return NULL;
    made->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    made->sibling = own_streams;
    own_streams = made;
    pthread_once(&thread_end_made, make_thread_end);
    pthread_setspecific(thread_end, made);
    return made;
}

void streams_after_fork(void) { own_streams = NULL; }

CUresult stream_resolve(CUstream handle, CUcontext *context, CUstream *stream)
{
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        TRY(context_current(context));
        *stream = handle == CU_STREAM_PER_THREAD ? stream_of_thread(*context) : NULL;
        return handle != CU_STREAM_PER_THREAD || *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    TRY(driver_ready());
    CUstream known = object_get(handle, STREAM);
    if (!known)
        return CUDA_ERROR_INVALID_HANDLE;
    *context = known->object.context;
    *stream = known;
    return CUDA_SUCCESS;
}

uint64_t stream_end(CUcontext context, CUstream stream)
{
    return __atomic_load_n(stream ? &stream->end : &context->end, __ATOMIC_ACQUIRE);
}

void stream_extend(CUcontext context, CUstream stream, uint64_t end)
{
    if (stream)
        raise_to(&stream->end, end);
    raise_to(&context->end, end);
}

void stream_wait(CUcontext context, CUstream stream)
{
    timeline_wait(timeline_own(context->card, stream_end(context, stream)));
    events_settle(context->card);
    host_functions_wait(context);
    pools_settle();
}

bool stream_done(CUcontext context, CUstream stream)
{
    return timeline_reached(timeline_own(context->card, stream_end(context, stream))) &&
           __atomic_load_n(&context->host_functions, __ATOMIC_ACQUIRE) == 0;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    CUcontext context;
    TRY(context_current(&context));
    if (!stream || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream made = object_new(STREAM, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    made->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    *stream = made;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    TRY(driver_ready());
    if (!object_get(stream, STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    capture_lose(stream);
    object_delete(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    TRY(capture_refuse(context, stream));
    stream_wait(context, stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    TRY(capture_refuse(context, stream));
    return stream_done(context, stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = stream ? stream->flags : CU_STREAM_DEFAULT;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = stream ? stream->priority : 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = stream ? stream->id : 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
    CUcontext context;
    CUstream stream;
    (void)flags;
    TRY(stream_resolve(handle, &context, &stream));
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    bool taken;
    TRY(capture_wait(event, stream, &taken));
    if (taken)
        return CUDA_SUCCESS;
    if (!event->moment->recorded)
        return CUDA_SUCCESS;
    /* A line has no place for waiting for another line, so the caller waits. */
    struct timeline_place place = event->moment->place;
    if (place.card != context->card || place.generation != node_generation)
        timeline_wait(place);
    else
        stream_extend(context, stream, place.position);
    return CUDA_SUCCESS;
}
