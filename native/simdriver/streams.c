/* Positions of streams on the card's time line, and each thread's own streams. */
#include "driver.h"
#include "timeline.h"

static uint64_t last_id;

static __thread CUstream own_streams;
static pthread_key_t thread_end;
static pthread_once_t thread_end_made = PTHREAD_ONCE_INIT;

CUstream stream_new(CUcontext context) {
    CUstream made = object_new(STREAM, sizeof *made, context);
    if (made)
        made->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    return made;
}

static void forget_own(void *first) {
    for (CUstream stream = first, next; stream; stream = next) {
        next = stream->sibling;
        object_delete(stream);
    }
}

static void make_thread_end(void) { pthread_key_create(&thread_end, forget_own); }

static CUstream stream_of_thread(CUcontext context) {
    for (CUstream stream = own_streams; stream; stream = stream->sibling)
        if (stream->object.context == context && object_get(stream, STREAM))
            return stream;
    CUstream made = stream_new(context);
    if (!made)
        return NULL;
    made->sibling = own_streams;
    own_streams = made;
    pthread_once(&thread_end_made, make_thread_end);
    pthread_setspecific(thread_end, made);
    return made;
}

void streams_after_fork(void) { own_streams = NULL; }

CUresult stream_resolve(CUstream handle, CUcontext *context, CUstream *stream) {
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

uint64_t stream_end(CUcontext context, CUstream stream) {
    return __atomic_load_n(stream ? &stream->end : &context->end, __ATOMIC_ACQUIRE);
}

void stream_extend(CUcontext context, CUstream stream, uint64_t end) {
    if (stream)
        raise_to(&stream->end, end);
    raise_to(&context->end, end);
}

void stream_wait(CUcontext context, CUstream stream) {
    timeline_wait(timeline_own(context->card, stream_end(context, stream)));
    events_settle(context->card);
    host_functions_wait(context);
    pools_settle();
}

bool stream_done(CUcontext context, CUstream stream) {
    return timeline_reached(timeline_own(context->card, stream_end(context, stream))) &&
           __atomic_load_n(&context->host_functions, __ATOMIC_ACQUIRE) == 0;
}
