#include "context.h"

#include <string.h>

#include "account.h"
#include "charge.h"
#include "control.h"
#include "fenka/lease.h"
#include "os.h"
#include "pools.h"

uint32_t context_deaths;

static struct os_lock counting;
static struct {
    unsigned contexts;
    uint64_t charged, primary;
} on_card[FENKA_MAX_CARDS];
#define NO_CARD_HOLDS ((uint64_t)1 << 50)
static uint64_t in_all; /* code that every context has */

uint64_t context_primary(unsigned card) {
    return __atomic_load_n(&on_card[card].primary, __ATOMIC_RELAXED);
}

void context_forget(void) {
    memset(on_card, 0, sizeof on_card);
    in_all = 0;
    counting.held = 0;
}

/* A process pays for its first context on a card; later ones are small beside it. */
static CUresult begin(CUdevice device, struct place *place) {
    CUresult result = place_device(place, device);
    if (result != CUDA_SUCCESS)
        return result;
    os_lock(&counting);
    if (on_card[place->card].contexts == 0) {
        on_card[place->card].charged = control_context_bytes(place->card) + in_all;
        result = charge(place, on_card[place->card].charged);
    }
    on_card[place->card].contexts += result == CUDA_SUCCESS;
    os_unlock(&counting);
    return result;
}

static void end(unsigned card) {
    os_lock(&counting);
    if (--on_card[card].contexts == 0)
        account_discharge(card, on_card[card].charged);
    os_unlock(&counting);
}

/* Under the lock, of the cards before `cards`. */
static void unload(uint64_t bytes, unsigned cards) {
    for (unsigned card = 0; card < cards; card++)
        if (on_card[card].contexts) {
            on_card[card].charged -= bytes;
            account_discharge(card, bytes);
        }
}

CUresult context_load(uint64_t bytes) {
    CUresult result = lease_ready() ? CUDA_SUCCESS : LEASE_BROKEN;
    unsigned card = 0;
    os_lock(&counting);
    if (result == CUDA_SUCCESS && (bytes > NO_CARD_HOLDS || in_all + bytes > NO_CARD_HOLDS))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    for (; card < FENKA_MAX_CARDS && result == CUDA_SUCCESS; card++) {
        if (!on_card[card].contexts)
            continue;
        result = charge(&(struct place){.card = (uint8_t)card}, bytes);
        if (result != CUDA_SUCCESS)
            break;
        on_card[card].charged += bytes;
    }
    if (result == CUDA_SUCCESS)
        in_all += bytes;
    else
        unload(bytes, card);
    os_unlock(&counting);
    return result;
}

void context_unload(uint64_t bytes) {
    os_lock(&counting);
    in_all -= bytes;
    unload(bytes, FENKA_MAX_CARDS);
    os_unlock(&counting);
}

static void drop_all_of(uint64_t context) {
    struct holding gone;
    unsigned shard = 0;
    __atomic_fetch_add(&context_deaths, 1, __ATOMIC_RELEASE);
    while (context && holdings_take_owned(&shard, context, &gone))
        give_up(&gone);
    pools_freed();
    pools_look(false);
}

static CUresult created(CUresult result, const struct place *place, void *context) {
    if (result == CUDA_SUCCESS)
        return settle(result, place, 0, CONTEXT, *(uint64_t *)context);
    end(place->card);
    return result;
}

#define CREATE(device, call)                                \
    do {                                                    \
        struct place place_;                                \
        CUresult refusal_ = begin(device, &place_);         \
        return refusal_ ? refusal_ : created(call, &place_, context); \
    } while (0)

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(device, REAL(cuCtxCreate)(context, flags, device));
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(device, REAL(cuCtxCreate_v2)(context, flags, device));
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags,
                        CUdevice device) {
    CREATE(device, REAL(cuCtxCreate_v3)(context, affinity, count, flags, device));
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    CREATE(device, REAL(cuCtxCreate_v4)(context, parameters, flags, device));
}

/* A context without a current one of its own, but it takes the card's memory all the same. */
CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    CREATE(device, REAL(cuGreenCtxCreate)(context, resources, device, flags));
}

static CUresult ended(CUresult result, bool ours, const struct holding *holding) {
    if (released(result, ours, holding) == CUDA_SUCCESS && ours) {
        drop_all_of(holding->key);
        end(holding->card);
    }
    return result;
}

/* Destroyed, however often it was attached. */
#define DESTROY(call)                                                   \
    do {                                                                \
        struct holding holding_;                                        \
        bool ours_ = holdings_take(CONTEXT, (uint64_t)context, &holding_); \
        return ended(call, ours_, &holding_);                           \
    } while (0)

CUresult cuCtxDestroy(CUcontext context) {
    DESTROY(REAL(cuCtxDestroy)(context));
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    DESTROY(REAL(cuCtxDestroy_v2)(context));
}

CUresult cuGreenCtxDestroy(CUgreenCtx context) {
    DESTROY(REAL(cuGreenCtxDestroy)(context));
}

CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    CUresult result = REAL(cuCtxAttach)(context, flags);
    if (result == CUDA_SUCCESS)
        holdings_refer(CONTEXT, (uint64_t)*context);
    return result;
}

CUresult cuCtxDetach(CUcontext context) {
    struct holding holding;
    bool last = release(CONTEXT, (uint64_t)context, &holding);
    return ended(REAL(cuCtxDetach)(context), last, &holding);
}

/* Of all limits these two are memory of any size that a program likes: the heap of its kernels' malloc, and the
 * buffer of their printf. Setting one again asks for room beside the old one for the length of the call. */
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    struct place place;
    if (limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE)
        return REAL(cuCtxSetLimit)(limit, value);
    CHARGE_OR_RETURN(&place, place_current(&place), value);
    return settle(REAL(cuCtxSetLimit)(limit, value), &place, value, HEAP,
                  place.owner + (limit == CU_LIMIT_PRINTF_FIFO_SIZE));
}

/* Every retain counts as a context while the driver is asked; only the first of them stays counted. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    struct place place;
    CUresult result = begin(device, &place);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    bool first = result == CUDA_SUCCESS &&
                 !__atomic_exchange_n(&on_card[place.card].primary, (uint64_t)*context, __ATOMIC_RELAXED);
    if (!first)
        end(place.card);
    return result;
}

/* The driver counts the retains, in more ways than we see; so it is asked whether the context is gone. */
static CUresult primary_changed(CUresult result, CUdevice device, bool reset) {
    unsigned int flags;
    int active = 1, card = card_of_device(device);
    if (result != CUDA_SUCCESS || card < 0)
        return result;
    if (REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS)
        active = 1;
    if (active && reset)
        drop_all_of(context_primary((unsigned)card));
    uint64_t gone = active ? 0 : __atomic_exchange_n(&on_card[card].primary, 0, __ATOMIC_RELAXED);
    if (gone) {
        drop_all_of(gone);
        end((unsigned)card);
    }
    return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return primary_changed(REAL(cuDevicePrimaryCtxRelease)(device), device, false);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return primary_changed(REAL(cuDevicePrimaryCtxRelease_v2)(device), device, false);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return primary_changed(REAL(cuDevicePrimaryCtxReset)(device), device, true);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return primary_changed(REAL(cuDevicePrimaryCtxReset_v2)(device), device, true);
}
