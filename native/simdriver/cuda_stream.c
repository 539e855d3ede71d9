/* Streams. A stream is not a queue but a position on the card's time line: the end of its last work. */
#include "driver.h"
#include "timeline.h"

CUresult stream_make(CUstream *stream, CUcontext context, unsigned flags, int priority) {
    if (!stream || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream made = stream_new(context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    *stream = made;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    CUcontext context;
    TRY(context_current(&context));
    return stream_make(stream, context, flags, priority);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream stream) {
    TRY(driver_ready());
    if (!object_get(stream, STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    capture_lose(stream);
    object_delete(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    TRY(capture_refuse(context, stream));
    stream_wait(context, stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    TRY(capture_refuse(context, stream));
    return stream_done(context, stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* A call that answers one value of a stream; NULL is the context's default stream. */
#define STREAM_GETTER(name, type, expression)           \
    CUresult name(CUstream handle, type *value) {       \
        CUcontext context;                              \
        CUstream stream;                                \
        TRY(stream_resolve(handle, &context, &stream)); \
        if (!value)                                     \
            return CUDA_ERROR_INVALID_VALUE;            \
        *value = (expression);                          \
        return CUDA_SUCCESS;                            \
    }
STREAM_GETTER(cuStreamGetFlags, unsigned int, stream ? stream->flags : CU_STREAM_DEFAULT)
STREAM_GETTER(cuStreamGetPriority, int, stream ? stream->priority : 0)
STREAM_GETTER(cuStreamGetCtx, CUcontext, context)
STREAM_GETTER(cuStreamGetId, unsigned long long, stream ? stream->id : 0)
STREAM_GETTER(cuStreamGetDevice, CUdevice, context->device)

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
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
    /* A time line cannot wait for another one, so the caller waits. */
    struct timeline_place place = event->moment->place;
    if (place.card != context->card || place.generation != node_generation)
        timeline_wait(place);
    else
        stream_extend(context, stream, place.position);
    return CUDA_SUCCESS;
}
