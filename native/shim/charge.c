#include "charge.h"

#include "account.h"
#include "context.h"
#include "late.h"
#include "pools.h"

/* The current context changes seldom and its device never; asking the driver once per thread is enough,
 * until a context dies and its address may come to name another. */
static __thread struct {
    CUcontext context;
    uint32_t deaths;
    uint8_t card;
} cache;

CUresult place_device(struct place *place, CUdevice device) {
    int card = card_of_device(device);
    if (card < 0)
        return lease_ready() ? CUDA_ERROR_INVALID_DEVICE : LEASE_BROKEN;
    place->card = (uint8_t)card;
    place->owner = 0;
    return CUDA_SUCCESS;
}

static CUresult look_up_current(struct place *place, CUcontext context, uint32_t deaths) {
    CUdevice device;
    CUresult result = REAL(cuCtxGetDevice)(&device);
    if (result == CUDA_SUCCESS)
        result = place_device(place, device);
    if (result != CUDA_SUCCESS)
        return result;
    cache.context = context;
    cache.deaths = deaths;
    cache.card = place->card;
    return CUDA_SUCCESS;
}

CUresult place_current(struct place *place) {
    CUcontext context = NULL;
    uint32_t deaths = __atomic_load_n(&context_deaths, __ATOMIC_ACQUIRE);
    CUresult result = REAL(cuCtxGetCurrent)(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context != cache.context || deaths != cache.deaths)
        result = look_up_current(place, context, deaths);
    place->card = cache.card;
    place->owner = (uint64_t)context;
    return result;
}

/* Stream-ordered memory belongs to its device's pool, which ends with the primary context. */
CUresult place_stream(struct place *place, CUstream stream) {
    CUcontext context = NULL, popped;
    bool own_device = stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
    CUresult result = own_device ? REAL(cuStreamGetCtx)(stream, &context) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && context)
        result = REAL(cuCtxPushCurrent_v2)(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = place_current(place);
    if (context)
        REAL(cuCtxPopCurrent_v2)(&popped);
    if (result == CUDA_SUCCESS)
        place->owner = context_primary(place->card);
    return result;
}

CUresult place_location(struct place *place, CUmemLocation location) {
    switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return place_device(place, location.id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *place = (struct place){.card = NO_CARD};
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult charge(const struct place *place, uint64_t bytes) {
    if (!lease_ready())
        return LEASE_BROKEN;
    /* Nothing can be had even where a lowered cap leaves less than nothing. */
    if (bytes == 0 || place->card == NO_CARD || account_charge(place->card, bytes))
        return CUDA_SUCCESS;
    bool less = late_look();
    less |= pools_look(true);
    return less && account_charge(place->card, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void discharge(uint8_t card, uint64_t bytes) {
    if (card != NO_CARD)
        account_discharge(card, bytes);
}

__attribute__((noinline, cold)) static void give_up_shared(const struct holding *gone) {
    if (gone->kind == OPENED) {
        account_unimport(gone->card, gone->bytes);
    } else if (gone->shared == EXPORTED) {
        account_give_up(gone->card, gone->bytes);
    } else if (gone->shared == POOLED) {
        pools_freed();
    } else { /* a graph's, or what has outlived one */
        pools_graph_memory(gone->card, -(int64_t)gone->bytes);
        account_discharge(gone->card, gone->bytes);
    }
}

void give_up(const struct holding *gone) {
    if (gone->card == NO_CARD)
        return;
    if (__builtin_expect(gone->shared || gone->kind == OPENED || gone->kind == NODE, 0))
        give_up_shared(gone);
    else
        account_discharge(gone->card, gone->bytes);
}

CUresult settle_as(CUresult result, const struct place *place, uint64_t bytes, enum kind kind, uint64_t key,
                   uint8_t shared) {
    struct holding old;
    if (result != CUDA_SUCCESS) {
        discharge(place->card, bytes);
        return result;
    }
    holdings_put((struct holding){.key = key,
                                  .bytes = bytes,
                                  .owner = place->owner,
                                  .references = 1,
                                  .kind = kind,
                                  .card = place->card,
                                  .shared = shared},
                 &old);
    if (__builtin_expect(old.kind != NOTHING, 0))
        give_up(&old);
    return result;
}

bool release(enum kind kind, uint64_t key, struct holding *holding) {
    return holdings_drop(kind, key, holding);
}

CUresult released(CUresult result, bool last, const struct holding *holding) {
    struct holding old;
    if (!last)
        return result;
    if (result == CUDA_SUCCESS) {
        give_up(holding);
        return result;
    }
    struct holding back = *holding;
    back.references = 1;
    holdings_put(back, &old);
    return result;
}
