/* Contexts: charged when created; what they own is discharged when they are destroyed. */
#include "card_bytes.h"
#include "charge.h"
#include "context_charge.h"
#include "context_state.h"
#include "pools.h"

static CUresult create_end(CUresult result, const struct target *target, void *context) {
    if (result == CUDA_SUCCESS)
        return charge_commit(result, target, 0, CONTEXT, *(uint64_t *)context);
    context_discharge(target->card);
    return result;
}

#define CREATE(device, call)                                              \
    do {                                                                  \
        struct target target_;                                            \
        CUresult refusal_ = context_charge(device, &target_);             \
        return refusal_ ? refusal_ : create_end(call, &target_, context); \
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

/* Contexts that share what another API draws. */
CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(device, REAL(cuGLCtxCreate)(context, flags, device));
}

CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(device, REAL(cuGLCtxCreate_v2)(context, flags, device));
}

CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get) {
    CREATE(device, REAL(cuVDPAUCtxCreate)(context, flags, device, display, get));
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get) {
    CREATE(device, REAL(cuVDPAUCtxCreate_v2)(context, flags, device, display, get));
}

/* A green context takes the card's memory like any other, although it cannot be current itself. */
CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    CREATE(device, REAL(cuGreenCtxCreate)(context, resources, device, flags));
}

static CUresult destroy_end(CUresult result, bool ours, const struct allocation *allocation) {
    if (free_end(result, ours, allocation) == CUDA_SUCCESS && ours) {
        discharge_owned(allocation->key);
        context_discharge(allocation->card);
    }
    return result;
}

/* Destroys the context whatever its number of references. */
#define DESTROY(call)                                                            \
    do {                                                                         \
        struct allocation allocation_;                                           \
        bool ours_ = allocations_take(CONTEXT, (uint64_t)context, &allocation_); \
        return destroy_end(call, ours_, &allocation_);                           \
    } while (0)

CUresult cuCtxDestroy(CUcontext context) { DESTROY(REAL(cuCtxDestroy)(context)); }

CUresult cuCtxDestroy_v2(CUcontext context) { DESTROY(REAL(cuCtxDestroy_v2)(context)); }

CUresult cuGreenCtxDestroy(CUgreenCtx context) { DESTROY(REAL(cuGreenCtxDestroy)(context)); }

CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    CUresult result = REAL(cuCtxAttach)(context, flags);
    if (result == CUDA_SUCCESS)
        allocations_retain(CONTEXT, (uint64_t)*context);
    return result;
}

CUresult cuCtxDetach(CUcontext context) {
    struct allocation allocation;
    bool last = free_begin(CONTEXT, (uint64_t)context, &allocation);
    return destroy_end(REAL(cuCtxDetach)(context), last, &allocation);
}

/* Two limits are memory whose size the program chooses: the heap for malloc in kernels, and the buffer of printf.
 * While a limit is set again, the old and the new size are both charged. */
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    struct target target;
    if (limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE)
        return REAL(cuCtxSetLimit)(limit, value);
    uint64_t taken = card_bytes(value);
    CHARGE_OR_RETURN(&target, target_current(&target), taken);
    return charge_commit(REAL(cuCtxSetLimit)(limit, value), &target, taken, HEAP,
                         target.owner + (limit == CU_LIMIT_PRINTF_FIFO_SIZE));
}

/* Each retain is counted as a context during the driver call; only the first one stays counted. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    struct target target;
    CUresult result = context_charge(device, &target);
    if (result != CUDA_SUCCESS)
        return result;
    result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    bool first = result == CUDA_SUCCESS && !context_set_primary(target.card, (uint64_t)*context);
    if (!first)
        context_discharge(target.card);
    return result;
}

/* The driver counts retains that the shim does not see, so the shim queries whether the context still exists. */
static CUresult primary_end(CUresult result, CUdevice device, bool reset) {
    unsigned int flags;
    int active = 1, card = card_of_device(device);
    if (result != CUDA_SUCCESS || card < 0)
        return result;
    if (REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS)
        active = 1;
    if (active && reset)
        discharge_owned(context_primary((unsigned)card));
    uint64_t destroyed = active ? 0 : context_set_primary((unsigned)card, 0);
    if (destroyed) {
        discharge_owned(destroyed);
        context_discharge((unsigned)card);
    }
    return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return primary_end(REAL(cuDevicePrimaryCtxRelease)(device), device, false);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return primary_end(REAL(cuDevicePrimaryCtxRelease_v2)(device), device, false);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return primary_end(REAL(cuDevicePrimaryCtxReset)(device), device, true);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return primary_end(REAL(cuDevicePrimaryCtxReset_v2)(device), device, true);
}
