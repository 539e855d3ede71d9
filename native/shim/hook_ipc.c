/* Memory that other processes open by a handle (cuIpc…). It is charged once, to its exporter while that has it. */
#include "account.h"
#include "card_bytes.h"
#include "charge.h"

/* A handle stands for the whole allocation, whatever address in it is given. */
static bool find_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes) {
    return HAS(cuMemGetAddressRange_v2) && REAL(cuMemGetAddressRange_v2)(base, bytes, pointer) == CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    struct allocation exported;
    CUdeviceptr base = pointer;
    size_t bytes;
    CUresult result = REAL(cuIpcGetMemHandle)(handle, pointer);
    if (result != CUDA_SUCCESS)
        return result;
    find_range(pointer, &base, &bytes);
    if (allocations_export(POINTER, base, &exported) && exported.card != NO_CARD)
        account_export(exported.card, exported.bytes);
    return result;
}

/* Opening a handle again returns the same address with one more reference. */
static CUresult open_end(CUresult result, const struct target *target, CUdeviceptr *pointer) {
    CUdeviceptr base;
    size_t bytes = 0;
    if (result != CUDA_SUCCESS || allocations_retain(IPC_IMPORT, *pointer))
        return result;
    uint64_t taken = find_range(*pointer, &base, &bytes) ? card_bytes(bytes) : 0;
    if (!taken || account_import(target->card, taken))
        return charge_commit(result, target, taken, IPC_IMPORT, *pointer);
    REAL(cuIpcCloseMemHandle)(*pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define OPEN(call)                                               \
    do {                                                         \
        struct target target_;                                   \
        CHARGE_OR_RETURN(&target_, target_current(&target_), 0); \
        return open_end(call, &target_, pointer);                \
    } while (0)

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(REAL(cuIpcOpenMemHandle)(pointer, handle, flags));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(REAL(cuIpcOpenMemHandle_v2)(pointer, handle, flags));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    struct allocation allocation;
    bool last = free_begin(IPC_IMPORT, pointer, &allocation);
    return free_end(REAL(cuIpcCloseMemHandle)(pointer), last, &allocation);
}
