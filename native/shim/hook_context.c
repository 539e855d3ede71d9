#include "hook_context.h"

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

void context_reset(void) {
    memset(on_card, 0, sizeof on_card);
    in_all = 0;
    counting.held = 0;
}

/* A process pays for its first context on a card; later ones are small beside it. */
static CUresult begin(CUdevice device, struct target *target) {
    CUresult result = target_device(target, device);
    if (result != CUDA_SUCCESS)
        return result;
    os_lock(&counting);
    if (on_card[target->card].contexts == 0) {
        on_card[target->card].charged = control_context_bytes(target->card) + in_all;
        result = charge(target, on_card[target->card].charged);
    }
    on_card[target->card].contexts += result == CUDA_SUCCESS;
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
        result = charge(&(struct target){.card = (uint8_t)card}, bytes);
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
    struct allocation gone;
    unsigned shard = 0;
    __atomic_fetch_add(&context_deaths, 1, __ATOMIC_RELEASE);
    while (context && allocations_take_owned(&shard, context, &gone))
        discharge_allocation(&gone);
    pools_set_stale();
    pools_poll(false);
}

static CUresult created(CUresult result, const struct target *target, void *context) {
    if (result == CUDA_SUCCESS)
        return charge_commit(result, target, 0, CONTEXT, *(uint64_t *)context);
    end(target->card);
    return result;
}

#define CREATE(device, call)                                \
    do {                                                    \
        struct target target_;                                \
        CUresult refusal_ = begin(device, &target_);         \
        return refusal_ ? refusal_ : created(call, &target_, context); \
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

static CUresult ended(CUresult result, bool ours, const struct allocation *allocation) {
    if (free_end(result, ours, allocation) == CUDA_SUCCESS && ours) {
        drop_all_of(allocation->key);
        end(allocation->card);
    }
    return result;
}

/* Destroyed, however often it was attached. */
#define DESTROY(call)                                                   \
    do {                                                                \
        struct allocation allocation_;                                        \
        bool ours_ = allocations_take(CONTEXT, (uint64_t)context, &allocation_); \
        return ended(call, ours_, &allocation_);                           \
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
        allocations_retain(CONTEXT, (uint64_t)*context);
    return result;
}

CUresult cuCtxDetach(CUcontext context) {
    struct allocation allocation;
    bool last = free_begin(CONTEXT, (uint64_t)context, &allocation);
    return ended(REAL(cuCtxDetach)(context), last, &allocation);
}

/* Of all limits these two are memory of any size that a program likes: the heap of its kernels' malloc, and the
 * buffer of their printf. Setting one again asks for room beside the old one for the length of the call. */
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    struct target target;
    if (limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE)
        return REAL(cuCtxSetLimit)(limit, value);
    CHARGE_OR_RETURN(&target, target_current(&target), value);
    return charge_commit(REAL(cuCtxSetLimit)(limit, value), &target, value, HEAP,
                  target.owner + (limit == CU_LIMIT_PRINTF_FIFO_SIZE));
}

/* Every retain counts as a context while the driver is asked; only the first of them stays counted. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    struct target target;
    CUresult result = begin(device, &target);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    bool first = result == CUDA_SUCCESS &&
                 !__atomic_exchange_n(&on_card[target.card].primary, (uint64_t)*context, __ATOMIC_RELAXED);
    if (!first)
        end(target.card);
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
