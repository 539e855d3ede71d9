#include "charge.h"

#include "account.h"
#include "hook_context.h"
#include "deferred_release.h"
#include "pools.h"

/* The current context changes seldom and its device never; asking the driver once per thread is enough,
 * until a context dies and its address may come to name another. */
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

static CUresult look_up_current(struct target *target, CUcontext context, uint32_t deaths) {
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
        result = look_up_current(target, context, deaths);
    target->card = cache.card;
    target->owner = (uint64_t)context;
    return result;
}

/* Stream-ordered memory belongs to its device's pool, which ends with the primary context. */
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

CUresult target_location(struct target *target, CUmemLocation location) {
    switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return target_device(target, location.id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *target = (struct target){.card = NO_CARD};
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult charge(const struct target *target, uint64_t bytes) {
    if (!lease_ready())
        return LEASE_BROKEN;
    /* Nothing can be had even where a lowered cap leaves less than nothing. */
    if (bytes == 0 || target->card == NO_CARD || account_charge(target->card, bytes))
        return CUDA_SUCCESS;
    bool less = deferred_poll();
    less |= pools_poll(true);
    return less && account_charge(target->card, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void discharge(uint8_t card, uint64_t bytes) {
    if (card != NO_CARD)
        account_discharge(card, bytes);
}

__attribute__((noinline, cold)) static void give_up_shared(const struct allocation *gone) {
    if (gone->kind == OPENED) {
        account_unimport(gone->card, gone->bytes);
    } else if (gone->shared == EXPORTED) {
        account_release_exported(gone->card, gone->bytes);
    } else if (gone->shared == POOLED) {
        pools_set_stale();
    } else { /* a graph's, or what has outlived one */
        pools_graph_memory(gone->card, -(int64_t)gone->bytes);
        account_discharge(gone->card, gone->bytes);
    }
}

void discharge_allocation(const struct allocation *gone) {
    if (gone->card == NO_CARD)
        return;
    if (__builtin_expect(gone->shared || gone->kind == OPENED || gone->kind == NODE, 0))
        give_up_shared(gone);
    else
        account_discharge(gone->card, gone->bytes);
}

CUresult charge_commit_as(CUresult result, const struct target *target, uint64_t bytes, enum kind kind, uint64_t key,
                   uint8_t shared) {
    struct allocation old;
    if (result != CUDA_SUCCESS) {
        discharge(target->card, bytes);
        return result;
    }
    allocations_put((struct allocation){.key = key,
                                  .bytes = bytes,
                                  .owner = target->owner,
                                  .references = 1,
                                  .kind = kind,
                                  .card = target->card,
                                  .shared = shared},
                 &old);
    if (__builtin_expect(old.kind != NOTHING, 0))
        discharge_allocation(&old);
    return result;
}

bool free_begin(enum kind kind, uint64_t key, struct allocation *allocation) {
    return allocations_release(kind, key, allocation);
}

CUresult free_end(CUresult result, bool last, const struct allocation *allocation) {
    struct allocation old;
    if (!last)
        return result;
    if (result == CUDA_SUCCESS) {
        discharge_allocation(allocation);
        return result;
    }
    struct allocation back = *allocation;
    back.references = 1;
    allocations_put(back, &old);
    return result;
}
