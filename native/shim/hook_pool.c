/* Stream-ordered memory, pools, and the synchronisations after which pools return memory. */
#include "card_bytes.h"
#include "charge.h"
#include "graph_memory.h"
#include "pools.h"

/* The graph that the stream is captured into, or NULL. The plain default stream is never captured. */
static CUgraph capturing(__typeof__(&cuStreamGetCaptureInfo_v2) query, CUstream stream, cuuint64_t *capture) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    CUresult result = query(stream, &status, capture, &graph, NULL, NULL);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : NULL;
}

#define CAPTURING(stream, suffix, capture) \
    (stream || sizeof #suffix > 1 ? capturing(REAL(cuStreamGetCaptureInfo_v2##suffix), stream, capture) : NULL)

/* A captured free takes effect when the graph is launched, so nothing is discharged now. */
#define FREE_ORDERED(suffix)                                                                         \
    do {                                                                                             \
        struct allocation allocation_;                                                               \
        cuuint64_t capture_ = 0;                                                                     \
        CUgraph graph_ = CAPTURING(stream, suffix, &capture_);                                       \
        bool ours_ = !graph_ && free_begin(POINTER, pointer, &allocation_);                          \
        CUresult result_ = REAL(cuMemFreeAsync##suffix)(pointer, stream);                            \
        if (__builtin_expect(!ours_, 0) && result_ == CUDA_SUCCESS)                                  \
            graph_ ? graphs_add_free_node(graph_, pointer, capture_) : graphs_memory_freed(pointer); \
        return free_end(result_, ours_, &allocation_);                                               \
    } while (0)

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) { FREE_ORDERED(); }

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) { FREE_ORDERED(_ptsz); }

/* Allocates from a pool, or as a node of the graph that the stream is captured into. If the driver does not report a
 * pool's memory, the allocation is charged by itself. */
#define ALLOCATE(where, pool, suffix, call)                                                             \
    do {                                                                                                \
        struct target target_;                                                                          \
        CUresult result_ = (where);                                                                     \
        if (result_ == CUDA_SUCCESS)                                                                    \
            result_ = charge(&target_, 0);                                                              \
        if (result_ != CUDA_SUCCESS)                                                                    \
            return result_;                                                                             \
        CUgraph graph_ = CAPTURING(stream, suffix, NULL);                                               \
        if (!graph_ && target_.card != NO_CARD && pointer &&                                            \
            pools_alloc_begin(target_.card, pool, rounded_up(bytes, CARD_GRANULE), &result_)) {         \
            if (result_ != CUDA_SUCCESS)                                                                \
                return result_;                                                                         \
            result_ = (call);                                                                           \
            result_ = pools_alloc_end(result_, result_ ? 0 : *pointer, stream);                         \
            return charge_commit_as(result_, &target_, 0, POINTER, result_ ? 0 : *pointer, POOLED);     \
        }                                                                                               \
        uint64_t taken_ = graph_ ? card_bytes_of_node(bytes) : card_bytes(bytes);                       \
        result_ = graph_ ? graphs_charge(&target_, taken_) : charge(&target_, taken_);                  \
        if (result_ != CUDA_SUCCESS)                                                                    \
            return result_;                                                                             \
        result_ = (call);                                                                               \
        return graph_ ? graphs_charge_commit(result_, &target_, taken_, graph_, result_ ? 0 : *pointer) \
                      : charge_commit(result_, &target_, taken_, POINTER, result_ ? 0 : *pointer);      \
    } while (0)

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(target_stream(&target_, stream), pools_current(target_.card), ,
             REAL(cuMemAllocAsync)(pointer, bytes, stream));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(target_stream(&target_, stream), pools_current(target_.card), _ptsz,
             REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream));
}

/* A pool whose creation the shim has not seen may be a default pool. */
static CUresult target_pool(struct target *target, CUmemoryPool pool) {
    struct allocation allocation;
    CUmemoryPool usual;
    int devices = 0;
    if (allocations_find(POOL, (uint64_t)pool, &allocation)) {
        *target = (struct target){.owner = allocation.owner, .card = allocation.card};
        return CUDA_SUCCESS;
    }
    REAL(cuDeviceGetCount)(&devices);
    for (CUdevice device = 0; device < devices; device++)
        if ((REAL(cuDeviceGetDefaultMemPool)(&usual, device) == CUDA_SUCCESS && usual == pool) ||
            (REAL(cuDeviceGetMemPool)(&usual, device) == CUDA_SUCCESS && usual == pool))
            return target_device(target, device);
    return target_current(target);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE(target_pool(&target_, pool), pool, , REAL(cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE(target_pool(&target_, pool), pool, _ptsz,
             REAL(cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream));
}

/* Shared pools are refused: what another process allocates from one, or keeps after this process ends, would not be
 * charged. */
CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    struct target target;
    if (properties && properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_OR_RETURN(&target, target_pool_kind(&target, properties->location, properties->allocType), 0);
    CUresult result = REAL(cuMemPoolCreate)(pool, properties);
    return charge_commit(result, &target, 0, POOL, result ? 0 : (uint64_t)*pool);
}

/* The usual pool of a location, which may be the host's. */
static CUresult usual_pool_end(CUresult result, const CUmemoryPool *pool, const CUmemLocation *location,
                               CUmemAllocationType type) {
    struct allocation known;
    struct target target;
    if (result != CUDA_SUCCESS || allocations_find(POOL, (uint64_t)*pool, &known) ||
        target_pool_kind(&target, *location, type) != CUDA_SUCCESS)
        return result;
    return charge_commit(result, &target, 0, POOL, (uint64_t)*pool);
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return usual_pool_end(REAL(cuMemGetDefaultMemPool)(pool, location, type), pool, location, type);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return usual_pool_end(REAL(cuMemGetMemPool)(pool, location, type), pool, location, type);
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    struct allocation allocation;
    CUresult result;
    bool ours = free_begin(POOL, (uint64_t)pool, &allocation);
    if (pools_destroy(pool, &result))
        return result;
    return free_end(REAL(cuMemPoolDestroy)(pool), ours, &allocation);
}

/* Memory that a pool keeps is unavailable to the whole lease. So the release threshold is always 0: at the next
 * synchronisation the driver returns whatever is free. */
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    cuuint64_t zero = 0;
    bool threshold = attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && value;
    return REAL(cuMemPoolSetAttribute)(pool, attribute, threshold ? &zero : value);
}

/* After these calls pools may have returned memory. */
static CUresult poll_pools(CUresult result) {
    pools_poll(false);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) { return poll_pools(REAL(cuMemPoolTrimTo)(pool, keep)); }

CUresult cuStreamSynchronize(CUstream stream) { return poll_pools(REAL(cuStreamSynchronize)(stream)); }

CUresult cuStreamSynchronize_ptsz(CUstream stream) { return poll_pools(REAL(cuStreamSynchronize_ptsz)(stream)); }

CUresult cuCtxSynchronize(void) { return poll_pools(REAL(cuCtxSynchronize)()); }

CUresult cuCtxSynchronize_v2(CUcontext context) { return poll_pools(REAL(cuCtxSynchronize_v2)(context)); }

CUresult cuEventSynchronize(CUevent event) { return poll_pools(REAL(cuEventSynchronize)(event)); }

CUresult cuDeviceGraphMemTrim(CUdevice device) { return poll_pools(REAL(cuDeviceGraphMemTrim)(device)); }

/* An abandoned capture's nodes are dropped: the driver may reuse its graph's address. */
#define END_CAPTURE(suffix)                                                          \
    do {                                                                             \
        cuuint64_t capture_ = 0;                                                     \
        bool active_ = CAPTURING(stream, suffix, &capture_) != NULL;                 \
        CUresult result_ = REAL(cuStreamEndCapture##suffix)(stream, graph);          \
        if (active_)                                                                 \
            graphs_capture_ended(capture_, result_ == CUDA_SUCCESS ? *graph : NULL); \
        return result_;                                                              \
    } while (0)

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { END_CAPTURE(); }

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) { END_CAPTURE(_ptsz); }
