/* Linear memory: plain, pitched, managed and stream-ordered. */
#include "charge.h"
#include "hook_graph.h"
#include "pools.h"

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    struct target target;
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAlloc_v2)(pointer, bytes);
    return charge_commit(result, &target, bytes, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    struct target target;
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAlloc)(pointer, bytes);
    return charge_commit(result, &target, bytes, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    struct target target;
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return charge_commit(result, &target, bytes, POINTER, result ? 0 : *pointer);
}

/* The driver chooses the pitch; this one is no narrower than those of today's cards. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t bytes;
    bool overflow = width > UINT64_MAX - 511 || __builtin_mul_overflow((width + 511) & ~(uint64_t)511, height, &bytes);
    return overflow ? UINT64_MAX : bytes;
}

/* If the driver took more after all, the difference is charged too, or the whole is given back. */
static CUresult settle_pitch(CUresult result, const struct target *target, uint64_t charged, uint64_t taken,
                             CUdeviceptr pointer) {
    if (result == CUDA_SUCCESS && taken > charged) {
        CUresult refusal = charge(target, taken - charged);
        if (refusal != CUDA_SUCCESS) {
            REAL(cuMemFree_v2)(pointer);
            return charge_commit(refusal, target, charged, POINTER, 0);
        }
        charged = taken;
    }
    return charge_commit(result, target, charged, POINTER, pointer);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                            unsigned int element_bytes) {
    struct target target;
    uint64_t bytes = pitched(width, height);
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element_bytes);
    bool ok = result == CUDA_SUCCESS;
    return settle_pitch(result, &target, bytes, ok ? *pitch * height : 0, ok ? *pointer : 0);
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element_bytes) {
    struct target target;
    uint64_t bytes = pitched(width, height);
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element_bytes);
    bool ok = result == CUDA_SUCCESS;
    return settle_pitch(result, &target, bytes, ok ? (uint64_t)*pitch * height : 0, ok ? *pointer : 0);
}

/* What is not held as a pointer may be of a graph, which is told where the memory has gone. */
static CUresult freed(CUresult result, bool ours, const struct allocation *allocation, CUdeviceptr pointer) {
    if (__builtin_expect(!ours, 0) && result == CUDA_SUCCESS)
        graphs_memory_freed(pointer);
    free_end(result, ours, allocation);
    if (__builtin_expect(ours && allocation->shared == POOLED, 0))
        pools_poll(false);
    return result;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    struct allocation allocation;
    bool ours = free_begin(POINTER, pointer, &allocation);
    return freed(REAL(cuMemFree_v2)(pointer), ours, &allocation, pointer);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    struct allocation allocation;
    bool ours = free_begin(POINTER, pointer, &allocation);
    return freed(REAL(cuMemFree)(pointer), ours, &allocation, pointer);
}

/* The graph that the stream's calls become part of, if they do. The plain default stream never captures. */
static CUgraph capturing(__typeof__(&cuStreamGetCaptureInfo_v2) ask, CUstream stream, cuuint64_t *capture) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    CUresult result = ask(stream, &status, capture, &graph, NULL, NULL);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : NULL;
}

#define CAPTURING(stream, suffix, capture) \
    (stream || sizeof #suffix > 1 ? capturing(REAL(cuStreamGetCaptureInfo_v2##suffix), stream, capture) : NULL)

/* What is freed in a capture is freed when the graph is launched: nothing is given up now. */
#define FREE_ORDERED(suffix)                                                       \
    do {                                                                           \
        struct allocation allocation_;                                                   \
        cuuint64_t capture_ = 0;                                                   \
        CUgraph graph_ = CAPTURING(stream, suffix, &capture_);                     \
        bool ours_ = !graph_ && free_begin(POINTER, pointer, &allocation_);              \
        CUresult result_ = REAL(cuMemFreeAsync##suffix)(pointer, stream);          \
        if (__builtin_expect(!ours_, 0) && result_ == CUDA_SUCCESS)                \
            graph_ ? graphs_add_free_node(graph_, pointer, capture_) : graphs_memory_freed(pointer); \
        return free_end(result_, ours_, &allocation_);                                \
    } while (0)

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    FREE_ORDERED();
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    FREE_ORDERED(_ptsz);
}

/* From a pool, or as part of the graph that the stream is captured into; where the driver tells nothing of its pools,
 * by itself. */
#define ALLOCATE(where, pool, suffix, call)                                                                    \
    do {                                                                                                       \
        struct target target_;                                                                                   \
        CUresult result_ = (where);                                                                            \
        if (result_ == CUDA_SUCCESS && !lease_ready())                                                         \
            result_ = LEASE_BROKEN;                                                                            \
        if (result_ != CUDA_SUCCESS)                                                                           \
            return result_;                                                                                    \
        CUgraph graph_ = CAPTURING(stream, suffix, NULL);                                                      \
        if (!graph_ && target_.card != NO_CARD && pointer && pools_alloc_begin(target_.card, pool, bytes, &result_)) { \
            if (result_ != CUDA_SUCCESS)                                                                       \
                return result_;                                                                                \
            result_ = (call);                                                                                  \
            result_ = pools_alloc_end(result_, result_ ? 0 : *pointer, stream);                                      \
            return charge_commit_as(result_, &target_, 0, POINTER, result_ ? 0 : *pointer, POOLED);                    \
        }                                                                                                      \
        result_ = charge(&target_, bytes);                                                                      \
        if (result_ != CUDA_SUCCESS)                                                                           \
            return result_;                                                                                    \
        result_ = (call);                                                                                      \
        return graph_ ? graphs_charge_commit(result_, &target_, bytes, graph_, result_ ? 0 : *pointer)                 \
                      : charge_commit(result_, &target_, bytes, POINTER, result_ ? 0 : *pointer);                      \
    } while (0)

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(target_stream(&target_, stream), pools_current(target_.card), , REAL(cuMemAllocAsync)(pointer, bytes, stream));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(target_stream(&target_, stream), pools_current(target_.card), _ptsz,
             REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream));
}

/* A pool that we did not see created may be a device's default one. */
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

/* What another process takes out of a pool of ours, or keeps of it when we have ended, nobody would pay for. */
CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    struct target target;
    if (properties && properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    CHARGE_OR_RETURN(&target, properties ? target_location(&target, properties->location) : CUDA_ERROR_INVALID_VALUE, 0);
    CUresult result = REAL(cuMemPoolCreate)(pool, properties);
    return charge_commit(result, &target, 0, POOL, result ? 0 : (uint64_t)*pool);
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    struct allocation allocation;
    CUresult result;
    bool ours = free_begin(POOL, (uint64_t)pool, &allocation);
    if (pools_destroy(pool, &result))
        return result;
    return free_end(REAL(cuMemPoolDestroy)(pool), ours, &allocation);
}

/* A pool that keeps what was freed keeps it from the whole lease. The driver gives back at the next synchronisation
 * what is beyond the threshold, which programs may only wish to be more than nothing. */
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    cuuint64_t nothing = 0;
    bool threshold = attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && value;
    return REAL(cuMemPoolSetAttribute)(pool, attribute, threshold ? &nothing : value);
}

/* After these calls pools may have less. */
static CUresult looked(CUresult result) {
    pools_poll(false);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    return looked(REAL(cuMemPoolTrimTo)(pool, keep));
}

CUresult cuStreamSynchronize(CUstream stream) {
    return looked(REAL(cuStreamSynchronize)(stream));
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    return looked(REAL(cuStreamSynchronize_ptsz)(stream));
}

CUresult cuCtxSynchronize(void) {
    return looked(REAL(cuCtxSynchronize)());
}

CUresult cuEventSynchronize(CUevent event) {
    return looked(REAL(cuEventSynchronize)(event));
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    return looked(REAL(cuDeviceGraphMemTrim)(device));
}

/* Only what has become a graph can be launched: the driver may give an abandoned one's address to another. */
#define END_CAPTURE(suffix)                                                     \
    do {                                                                        \
        cuuint64_t capture_ = 0;                                                 \
        bool active_ = CAPTURING(stream, suffix, &capture_) != NULL;            \
        CUresult result_ = REAL(cuStreamEndCapture##suffix)(stream, graph);     \
        if (active_)                                                            \
            graphs_capture_ended(capture_, result_ == CUDA_SUCCESS ? *graph : NULL); \
        return result_;                                                         \
    } while (0)

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    END_CAPTURE();
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    END_CAPTURE(_ptsz);
}
