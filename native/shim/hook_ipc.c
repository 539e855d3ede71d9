/* Memory that processes open by a handle (cuIpc…): charged to its maker while that has it, and to nobody twice. */
#include "account.h"
#include "charge.h"

/* A handle is of the whole allocation, whatever address in it is given. */
static bool whole(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes) {
    return HAS(cuMemGetAddressRange_v2) && REAL(cuMemGetAddressRange_v2)(base, bytes, pointer) == CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    struct allocation exported;
    CUdeviceptr base = pointer;
    size_t bytes;
    CUresult result = REAL(cuIpcGetMemHandle)(handle, pointer);
    if (result != CUDA_SUCCESS)
        return result;
    whole(pointer, &base, &bytes);
    if (allocations_export(POINTER, base, &exported) && exported.card != NO_CARD)
        account_export(exported.card, exported.bytes);
    return result;
}

/* One handle opened again is one address more often. */
static CUresult opened(CUresult result, const struct target *target, CUdeviceptr *pointer) {
    CUdeviceptr base;
    size_t bytes = 0;
    if (result != CUDA_SUCCESS || allocations_retain(OPENED, *pointer))
        return result;
    if (!whole(*pointer, &base, &bytes) || account_import(target->card, bytes))
        return charge_commit(result, target, bytes, OPENED, *pointer);
    REAL(cuIpcCloseMemHandle)(*pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define OPEN(call)                                                 \
    do {                                                           \
        struct target target_;                                       \
        CHARGE_OR_RETURN(&target_, target_current(&target_), 0);      \
        return opened(call, &target_, pointer);                     \
    } while (0)

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(REAL(cuIpcOpenMemHandle)(pointer, handle, flags));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(REAL(cuIpcOpenMemHandle_v2)(pointer, handle, flags));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    struct allocation allocation;
    bool last = free_begin(OPENED, pointer, &allocation);
    return free_end(REAL(cuIpcCloseMemHandle)(pointer), last, &allocation);
}
