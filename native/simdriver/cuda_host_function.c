/* Functions of the program that a stream calls. A thread that synchronises waits for them, too. */
#include "graph.h"
#include "timeline.h"

static CUresult enqueue(CUstream handle, CUhostFn function, CUstreamCallback callback, void *data) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {function, data}};
    if (callback) /* a graph's functions have another signature */
        TRY(capture_refuse(context, stream));
    TRY(capture_work(context, stream, &work, &taken));
    if (taken)
        return CUDA_SUCCESS;
    struct timeline_place at = timeline_own(context->card, stream_end(context, stream));
    const struct host_call call = {at, context, handle, function, callback, data, NULL};
    return host_function_add(&call) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    return function ? enqueue(stream, function, NULL, data) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags) {
    return callback && flags == 0 ? enqueue(stream, NULL, callback, data) : CUDA_ERROR_INVALID_VALUE;
}
