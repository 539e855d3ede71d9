#include "target.h"

#include "context_state.h"

/* A context's device never changes, so each thread queries it once. The death of any context invalidates the cache,
 * because its address may come to name another context. */
static __thread struct {
    CUcontext context;
    uint32_t deaths;
    uint8_t card;
} cache;

CUresult target_device(struct target *target, CUdevice device) {
    int card = card_of_device(device);
    if (card < 0)
        return lease_ready() ? CUDA_ERROR_INVALID_DEVICE : LEASE_BROKEN;
    target->card = (uint8_t)card;
    target->owner = 0;
    return CUDA_SUCCESS;
}

static CUresult query_current(struct target *target, CUcontext context, uint32_t deaths) {
    CUdevice device;
    CUresult result = REAL(cuCtxGetDevice)(&device);
    if (result == CUDA_SUCCESS)
        result = target_device(target, device);
    if (result != CUDA_SUCCESS)
        return result;
    cache.context = context;
    cache.deaths = deaths;
    cache.card = target->card;
    return CUDA_SUCCESS;
}

CUresult target_current(struct target *target) {
    CUcontext context = NULL;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    CUresult result = REAL(cuCtxGetCurrent)(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context != cache.context || deaths != cache.deaths)
        result = query_current(target, context, deaths);
    target->card = cache.card;
    target->owner = (uint64_t)context;
    return result;
}

/* The owner is the primary context: stream-ordered memory belongs to the device's pool, which dies with it. */
CUresult target_stream(struct target *target, CUstream stream) {
    CUcontext context = NULL, popped;
    bool own_device = stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
    CUresult result = own_device ? REAL(cuStreamGetCtx)(stream, &context) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && context)
        result = REAL(cuCtxPushCurrent_v2)(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = target_current(target);
    if (context)
        REAL(cuCtxPopCurrent_v2)(&popped);
    if (result == CUDA_SUCCESS)
        target->owner = context_primary(target->card);
    return result;
}

/* Without a context, the first device's: the program will see whatever is charged there. */
static CUresult target_anywhere(struct target *target) {
    CUresult result = target_current(target);
    return result == CUDA_ERROR_INVALID_CONTEXT ? target_device(target, 0) : result;
}

/* A location that is not known here may be on the card. The driver decides whether it exists. */
CUresult target_location(struct target *target, CUmemLocation location) {
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return target_device(target, location.id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *target = (struct target){.card = NO_CARD};
        return CUDA_SUCCESS;
    default:
        return target_anywhere(target);
    }
}

/* Managed memory moves to the card that uses it, wherever it begins. */
CUresult target_pool_kind(struct target *target, CUmemLocation location, CUmemAllocationType type) {
    bool fixed = type == CU_MEM_ALLOCATION_TYPE_PINNED || location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    return fixed ? target_location(target, location) : target_anywhere(target);
}
