/* The calls that capture streams. */
#include "graph.h"

CUresult cuStreamBeginCapture(CUstream stream) {
    return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = capture_exchange_mode(*mode);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    return stream ? capture_begin(stream, mode, NULL, NULL) : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode *needs,
                                     const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    CUcontext context;
    CUstream stream;
    (void)edges;
    TRY(stream_resolve(handle, &context, &stream));
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED || !object_get(graph, GRAPH) ||
        !graph_needs_fit(graph, needs, count))
        return CUDA_ERROR_INVALID_VALUE;
    const struct tips tips = {(CUgraphNode *)needs, count};
    return stream ? capture_begin(stream, mode, graph, &tips) : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *needs, const CUgraphEdgeData *edges,
                                              size_t count, unsigned int flags) {
    CUcontext context;
    CUstream stream;
    (void)edges;
    TRY(stream_resolve(handle, &context, &stream));
    if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (count && !needs))
        return CUDA_ERROR_INVALID_VALUE;
    const struct tips tips = {needs, count};
    return capture_depend(stream, &tips, flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *needs, size_t count, unsigned int flags) {
    return cuStreamUpdateCaptureDependencies_v2(stream, needs, NULL, count, flags);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    return graph ? capture_end(stream, graph) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return cuStreamGetCaptureInfo_v3(stream, status, NULL, NULL, NULL, NULL, NULL);
}

/* Captured dependencies are all plain. Programs read as many entries as there are dependencies. */
static const CUgraphEdgeData plain[1024];

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **needs, const CUgraphEdgeData **edges, size_t *count) {
    CUcontext context;
    CUstream stream;
    struct capture_info info;
    TRY(stream_resolve(handle, &context, &stream));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_info(context, stream, &info));
    *status = info.status;
    if (edges)
        *edges = NULL;
    if (info.status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (edges && info.tips.count > sizeof plain / sizeof *plain)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (edges)
        *edges = plain;
    if (id)
        *id = info.id;
    if (graph)
        *graph = info.graph;
    if (needs)
        *needs = info.tips.nodes;
    if (count)
        *count = info.tips.count;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **needs, size_t *count) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, needs, NULL, count);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, NULL, NULL, NULL, NULL);
}
