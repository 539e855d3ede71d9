/* Events: the moment when the stream's earlier work is done. */
#include <stdlib.h>

#include "ipc_share.h"
#include "timeline.h"

#define FLAGS (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    CUcontext context;
    TRY(context_current(&context));
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (!event || flags & ~(unsigned)FLAGS || (shared && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent made = object_new(EVENT, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->moment = shared ? (struct moment *)arena_take(sizeof *made->moment, 0, &made->offset) : &made->own;
    if (!made->moment) {
        object_delete(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made->moment = (struct moment){0};
    *event = made;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event->imported)
        event_unlist(event);
    if (event->imported)
        ipc_unmap((uintptr_t)event->moment, sizeof *event->moment);
    else if (event->flags & CU_EVENT_INTERPROCESS)
        arena_give_back((uintptr_t)event->moment, sizeof *event->moment, event->offset);
    free(event->tips.nodes);
    object_delete(event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags) {
    CUcontext context;
    CUstream stream;
    (void)flags;
    TRY(stream_resolve(handle, &context, &stream));
    if (!object_get(event, EVENT) || !context_shares(event->object.context, context))
        return CUDA_ERROR_INVALID_HANDLE;
    if (capture_record(event, stream))
        return CUDA_SUCCESS;
    event_mark(event, context->card, stream_end(context, stream));
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }

CUresult cuEventQuery(CUevent event) {
    TRY(driver_ready());
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (capture_knows(event))
        return CUDA_ERROR_CAPTURED_EVENT;
    return event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
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

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    TRY(driver_ready());
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!object_get(start, EVENT) || !object_get(end, EVENT) || !start->moment->recorded || !end->moment->recorded ||
        (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->moment->at_ns - start->moment->at_ns) / 1e6);
    return CUDA_SUCCESS;
}
