/* Creation and destruction of contexts, primary contexts, and queries. */
#include <stdlib.h>
#include <string.h>

#include "sim_memory.h"
#include "driver.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st primaries[FENKA_NODE_CARDS];
static struct CUctx_st *created; /* never freed, so that stale handles are recognised */
static uint64_t last_id;

/* Under the lock. The first context on a card costs the amount of the card's model. */
static CUresult activate(CUcontext context, CUdevice device, unsigned flags) {
    uint32_t card = device_cards[device];
    uint64_t *held = &node_state->processes[node_slot].contexts[card];
    if (!node_owns_slot())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    if (*held == 0 && !sim_memory_charge(card, node_state->cards[card].context_bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_fetch_add(held, 1, __ATOMIC_SEQ_CST);
    if (!device_present(card)) {
        if (__atomic_sub_fetch(held, 1, __ATOMIC_SEQ_CST) == 0)
            sim_memory_release(card, node_state->cards[card].context_bytes);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    context->magic = CONTEXT_MAGIC;
    context->card = card;
    context->device = device;
    context->flags = flags;
    context->id = ++last_id;
    context->end = 0;
    context->life++;
    memset(context->limits, 0, sizeof context->limits);
    context->limits[CU_LIMIT_STACK_SIZE] = 1024;
    context->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
    context->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    context->alive = true;
    return CUDA_SUCCESS;
}

static void deactivate(CUcontext context) {
    stream_wait(context, NULL);
    captures_drop(context);
    context->alive = false;
    memory_drop_context(context);
    if (!node_owns_slot())
        return;
    uint64_t *held = &node_state->processes[node_slot].contexts[context->card];
    bool last = __atomic_sub_fetch(held, 1, __ATOMIC_SEQ_CST) == 0;
    modules_drop(context, last);
    if (!last)
        return;
    pools_card_left(context->card);
    sim_memory_release(context->card, node_state->cards[context->card].context_bytes);
}

void contexts_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (int i = 0; i < FENKA_NODE_CARDS; i++)
        primaries[i].alive = false, primaries[i].references = 0;
    for (CUcontext context = created; context; context = context->next)
        context->alive = false;
}

/* ---- primary contexts ---- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext primary = &primaries[device];
    pthread_mutex_lock(&lock);
    primary->primary = true;
    CUresult result = primary->alive ? CUDA_SUCCESS : activate(primary, device, primary->flags);
    if (result == CUDA_SUCCESS) {
        primary->references++;
        *context = primary;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    CUcontext primary = &primaries[device];
    pthread_mutex_lock(&lock);
    bool held = primary->references > 0;
    if (held && --primary->references == 0 && primary->alive)
        deactivate(primary);
    pthread_mutex_unlock(&lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* A reset ends the context even if it is retained. */
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    CUcontext primary = &primaries[device];
    pthread_mutex_lock(&lock);
    if (primary->alive)
        deactivate(primary);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    uint32_t card;
    TRY(device_card(device, &card));
    primaries[device].flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = primaries[device].flags;
    *active = primaries[device].alive;
    return CUDA_SUCCESS;
}

/* ---- the stack ---- */

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    TRY(driver_ready());
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context_stack_full())
        return CUDA_ERROR_INVALID_VALUE;
    context_push(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    TRY(driver_ready());
    CUcontext popped;
    if (!context_pop(&popped))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = popped;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    TRY(driver_ready());
    CUcontext popped;
    if (!context) {
        context_pop(&popped);
        return CUDA_SUCCESS;
    }
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    context_set_top(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    TRY(driver_ready());
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = context_top();
    return CUDA_SUCCESS;
}

/* ---- created contexts ---- */

static CUresult create(CUcontext *context, unsigned flags, CUdevice device) {
    CUcontext fresh = calloc(1, sizeof *fresh);
    if (!fresh)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    CUresult result = activate(fresh, device, flags);
    if (result == CUDA_SUCCESS) {
        fresh->next = created;
        created = fresh;
    }
    pthread_mutex_unlock(&lock);
    if (result != CUDA_SUCCESS) {
        free(fresh);
        return result;
    }
    *context = fresh;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!context || context_stack_full())
        return CUDA_ERROR_INVALID_VALUE;
    TRY(create(context, flags, device));
    context_push(*context);
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags,
                        CUdevice device) {
    (void)affinity;
    return count == 0 ? cuCtxCreate_v2(context, flags, device) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    bool plain = !parameters || (parameters->numExecAffinityParams == 0 && !parameters->cigParams);
    return plain ? cuCtxCreate_v2(context, flags, device) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult destroy(CUcontext context) {
    pthread_mutex_lock(&lock);
    bool ours = context->alive;
    if (ours)
        deactivate(context);
    pthread_mutex_unlock(&lock);
    CUcontext popped;
    if (context_top() == context)
        context_pop(&popped);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    TRY(driver_ready());
    if (!context_valid(context) || context->primary || context->green)
        return CUDA_ERROR_INVALID_CONTEXT;
    return destroy(context);
}

/* ---- contexts with a part of a device ---- */

CUresult context_of_part(CUcontext *context, CUdevice device, unsigned multiprocessors) {
    CUcontext primary;
    TRY(cuDevicePrimaryCtxRetain(&primary, device));
    CUresult result = create(context, 0, device);
    if (result == CUDA_SUCCESS)
        (*context)->multiprocessors = multiprocessors;
    else
        cuDevicePrimaryCtxRelease(device);
    return result;
}

CUresult context_part_end(CUcontext context) {
    CUdevice device = context->device;
    TRY(destroy(context));
    return cuDevicePrimaryCtxRelease(device);
}

bool context_shares(CUcontext one, CUcontext other) {
    return one == other || ((one->green || other->green) && one->device == other->device);
}

uint64_t context_duration(CUcontext context, uint64_t duration_ns) {
    uint64_t whole = device_duration(context->card, duration_ns);
    return context->multiprocessors ? whole * device_multiprocessors(context->card) / context->multiprocessors : whole;
}

/* ---- questions ---- */

CUresult cuCtxGetDevice(CUdevice *device) {
    CUcontext context;
    TRY(context_current(&context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags) {
    CUcontext context;
    TRY(context_current(&context));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
    CUcontext context;
    TRY(context_current(&context));
    context->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    CUcontext current;
    if (!context) {
        TRY(context_current(&current));
        context = current;
    }
    if (!context_valid(context))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
    TRY(driver_ready());
    if (context && !context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    TRY(driver_ready());
    if (!context)
        return cuCtxGetDevice(device);
    if (!device || !context_valid(context))
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
    TRY(driver_ready());
    if (!context)
        return cuCtxSynchronize();
    if (!context_valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    TRY(capture_all_refuse(context));
    stream_wait(context, NULL);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    CUcontext context;
    TRY(context_current(&context));
    TRY(capture_all_refuse(context));
    stream_wait(context, NULL);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    CUcontext context;
    TRY(context_current(&context));
    if ((unsigned)limit >= CU_LIMIT_MAX || (unsigned)limit >= CONTEXT_LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    CUcontext context;
    TRY(context_current(&context));
    if ((unsigned)limit >= CU_LIMIT_MAX || (unsigned)limit >= CONTEXT_LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CUcontext context;
    TRY(context_current(&context));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
    CUcontext context;
    TRY(context_current(&context));
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}

/* Only a hint; there is no cache. */
CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    CUcontext context;
    (void)config;
    return context_current(&context);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    CUcontext context;
    TRY(context_current(&context));
    if (!context_valid(peer) || peer->device == context->device)
        return CUDA_ERROR_INVALID_CONTEXT;
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    CUcontext context;
    TRY(context_current(&context));
    return context_valid(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
