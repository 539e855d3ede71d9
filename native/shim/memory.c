/* Linear memory: plain, pitched, managed and stream-ordered. */
#include "charge.h"
#include "graphs.h"

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_current(&place), bytes);
    CUresult result = REAL(cuMemAlloc_v2)(pointer, bytes);
    return settle(result, &place, bytes, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_current(&place), bytes);
    CUresult result = REAL(cuMemAlloc)(pointer, bytes);
    return settle(result, &place, bytes, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_current(&place), bytes);
    CUresult result = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return settle(result, &place, bytes, POINTER, result ? 0 : *pointer);
}

/* The driver chooses the pitch; this one is no narrower than those of today's cards. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t bytes;
    bool overflow = width > UINT64_MAX - 511 || __builtin_mul_overflow((width + 511) & ~(uint64_t)511, height, &bytes);
    return overflow ? UINT64_MAX : bytes;
}

/* If the driver took more after all, the difference is charged too, or the whole is given back. */
static CUresult settle_pitch(CUresult result, const struct place *place, uint64_t charged, uint64_t taken,
                             CUdeviceptr pointer) {
    if (result == CUDA_SUCCESS && taken > charged) {
        CUresult refusal = charge(place, taken - charged);
        if (refusal != CUDA_SUCCESS) {
            REAL(cuMemFree_v2)(pointer);
            return settle(refusal, place, charged, POINTER, 0);
        }
        charged = taken;
    }
    return settle(result, place, charged, POINTER, pointer);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                            unsigned int element_bytes) {
    struct place place;
    uint64_t bytes = pitched(width, height);
    CHARGE_OR_RETURN(&place, place_current(&place), bytes);
    CUresult result = REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element_bytes);
    bool ok = result == CUDA_SUCCESS;
    return settle_pitch(result, &place, bytes, ok ? *pitch * height : 0, ok ? *pointer : 0);
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element_bytes) {
    struct place place;
    uint64_t bytes = pitched(width, height);
    CHARGE_OR_RETURN(&place, place_current(&place), bytes);
    CUresult result = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element_bytes);
    bool ok = result == CUDA_SUCCESS;
    return settle_pitch(result, &place, bytes, ok ? (uint64_t)*pitch * height : 0, ok ? *pointer : 0);
}

/* What is not held as a pointer may be of a graph, which is told where the memory has gone. */
static CUresult freed(CUresult result, bool ours, const struct holding *holding, CUdeviceptr pointer) {
    if (__builtin_expect(!ours, 0) && result == CUDA_SUCCESS)
        graphs_freed(pointer, NULL);
    return released(result, ours, holding);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    struct holding holding;
    bool ours = release(POINTER, pointer, &holding);
    return freed(REAL(cuMemFree_v2)(pointer), ours, &holding, pointer);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    struct holding holding;
    bool ours = release(POINTER, pointer, &holding);
    return freed(REAL(cuMemFree)(pointer), ours, &holding, pointer);
}

/* The graph that the stream's calls become part of, if they do. The plain default stream never captures. */
static CUgraph capturing(__typeof__(&cuStreamGetCaptureInfo_v2) ask, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    CUresult result = ask(stream, &status, NULL, &graph, NULL, NULL);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : NULL;
}

#define CAPTURING(stream, suffix) \
    (stream || sizeof #suffix > 1 ? capturing(REAL(cuStreamGetCaptureInfo_v2##suffix), stream) : NULL)

/* Discharged when the free is ordered, not when the stream gets there or the pool gives memory back. */
#define FREE_ORDERED(suffix)                                                       \
    do {                                                                           \
        struct holding holding_;                                                   \
        bool ours_ = release(POINTER, pointer, &holding_);                         \
        CUresult result_ = REAL(cuMemFreeAsync##suffix)(pointer, stream);          \
        if (__builtin_expect(!ours_, 0) && result_ == CUDA_SUCCESS)                \
            graphs_freed(pointer, CAPTURING(stream, suffix));                      \
        return released(result_, ours_, &holding_);                                \
    } while (0)

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    FREE_ORDERED();
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    FREE_ORDERED(_ptsz);
}

static CUresult settle_ordered(CUresult result, struct place *place, uint64_t bytes, CUdeviceptr pointer,
                               CUgraph graph) {
    return graph ? graphs_settle(result, place, bytes, graph, pointer)
                 : settle(result, place, bytes, POINTER, pointer);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_stream(&place, stream), bytes);
    CUresult result = REAL(cuMemAllocAsync)(pointer, bytes, stream);
    return settle_ordered(result, &place, bytes, result ? 0 : *pointer, CAPTURING(stream, ));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_stream(&place, stream), bytes);
    CUresult result = REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream);
    return settle_ordered(result, &place, bytes, result ? 0 : *pointer, CAPTURING(stream, _ptsz));
}

/* A pool that we did not see created may be a device's default one. */
static CUresult place_pool(struct place *place, CUmemoryPool pool) {
    struct holding holding;
    CUmemoryPool usual;
    int devices = 0;
    if (holdings_find(POOL, (uint64_t)pool, &holding)) {
        *place = (struct place){.owner = holding.owner, .card = holding.card};
        return CUDA_SUCCESS;
    }
    REAL(cuDeviceGetCount)(&devices);
    for (CUdevice device = 0; device < devices; device++)
        if ((REAL(cuDeviceGetDefaultMemPool)(&usual, device) == CUDA_SUCCESS && usual == pool) ||
            (REAL(cuDeviceGetMemPool)(&usual, device) == CUDA_SUCCESS && usual == pool))
            return place_device(place, device);
    return place_current(place);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_pool(&place, pool), bytes);
    CUresult result = REAL(cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream);
    return settle_ordered(result, &place, bytes, result ? 0 : *pointer, CAPTURING(stream, ));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    struct place place;
    CHARGE_OR_RETURN(&place, place_pool(&place, pool), bytes);
    CUresult result = REAL(cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream);
    return settle_ordered(result, &place, bytes, result ? 0 : *pointer, CAPTURING(stream, _ptsz));
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    struct place place;
    CHARGE_OR_RETURN(&place, properties ? place_location(&place, properties->location) : CUDA_ERROR_INVALID_VALUE, 0);
    CUresult result = REAL(cuMemPoolCreate)(pool, properties);
    return settle(result, &place, 0, POOL, result ? 0 : (uint64_t)*pool);
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    struct holding holding;
    bool ours = release(POOL, (uint64_t)pool, &holding);
    return released(REAL(cuMemPoolDestroy)(pool), ours, &holding);
}

/* Memory is charged from allocation to free, so a pool must not keep what was freed: beside a full pool of
 * freed memory a program could take its whole slice once more. The driver gives back at the next
 * synchronisation what is beyond the threshold, which programs may only wish to be more than nothing. */
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    cuuint64_t nothing = 0;
    bool threshold = attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && value;
    return REAL(cuMemPoolSetAttribute)(pool, attribute, threshold ? &nothing : value);
}
