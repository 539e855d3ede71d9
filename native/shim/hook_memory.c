/* Linear memory: plain, pitched and managed. */
#include "card_bytes.h"
#include "charge.h"
#include "graph_memory.h"
#include "pools.h"

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    struct target target;
    uint64_t taken = card_bytes(bytes);
    CHARGE_OR_RETURN(&target, target_current(&target), taken);
    CUresult result = REAL(cuMemAlloc_v2)(pointer, bytes);
    return charge_commit(result, &target, taken, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    struct target target;
    uint64_t taken = card_bytes(bytes);
    CHARGE_OR_RETURN(&target, target_current(&target), taken);
    CUresult result = REAL(cuMemAlloc)(pointer, bytes);
    return charge_commit(result, &target, taken, POINTER, result ? 0 : *pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    struct target target;
    uint64_t taken = card_bytes(bytes);
    CHARGE_OR_RETURN(&target, target_current(&target), taken);
    CUresult result = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return charge_commit(result, &target, taken, POINTER, result ? 0 : *pointer);
}

/* An upper bound for today's cards; the driver chooses the pitch. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t bytes;
    bool overflow = __builtin_mul_overflow(rounded_up(width, CARD_GRANULE), height, &bytes);
    return overflow ? UINT64_MAX : card_bytes(bytes);
}

/* If the driver allocated more than was charged, the difference is charged too, or all of it is freed. */
static CUresult commit_pitch(CUresult result, const struct target *target, uint64_t charged, uint64_t allocated,
                             CUdeviceptr pointer) {
    if (result == CUDA_SUCCESS && allocated > charged) {
        CUresult refusal = charge(target, allocated - charged);
        if (refusal != CUDA_SUCCESS) {
            REAL(cuMemFree_v2)(pointer);
            return charge_commit(refusal, target, charged, POINTER, 0);
        }
        charged = allocated;
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
    return commit_pitch(result, &target, bytes, ok ? card_bytes(*pitch * height) : 0, ok ? *pointer : 0);
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element_bytes) {
    struct target target;
    uint64_t bytes = pitched(width, height);
    CHARGE_OR_RETURN(&target, target_current(&target), bytes);
    CUresult result = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element_bytes);
    bool ok = result == CUDA_SUCCESS;
    return commit_pitch(result, &target, bytes, ok ? card_bytes((uint64_t)*pitch * height) : 0, ok ? *pointer : 0);
}

/* A pointer that is no allocation of its own may belong to a graph. */
static CUresult memory_free_end(CUresult result, bool ours, const struct allocation *allocation, CUdeviceptr pointer) {
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
    return memory_free_end(REAL(cuMemFree_v2)(pointer), ours, &allocation, pointer);
}

CUresult cuMemFree(CUdeviceptr_v1 pointer) {
    struct allocation allocation;
    bool ours = free_begin(POINTER, pointer, &allocation);
    return memory_free_end(REAL(cuMemFree)(pointer), ours, &allocation, pointer);
}
