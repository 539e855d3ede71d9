/* Copies. They are real and complete when the call returns; they take no time on the card's time line. */
#include <string.h>

#include "driver.h"

#define DEVICE true
#define HOST false

/* A blocking copy follows all earlier work. */
static CUresult wait_for_work(void) {
    CUcontext context;
    TRY(context_current(&context));
    TRY(capture_unsafe());
    stream_wait(context, NULL);
    return CUDA_SUCCESS;
}

static CUresult copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t bytes) {
    if (bytes == 0)
        return CUDA_SUCCESS;
    to_device |= addresses_contain(to);
    from_device |= addresses_contain(from);
    if (!to || !from || (to_device && !memory_holds(to, bytes, true)) ||
        (from_device && !memory_holds(from, bytes, false)))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

/* An address that the driver knows must contain the bytes; any other is the host's. */
static CUresult copy_unified(uintptr_t to, uintptr_t from, size_t bytes) {
    struct allocation held;
    return copy(to, memory_find(to, &held), from, memory_find(from, &held), bytes);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    TRY(wait_for_work());
    return copy(to, DEVICE, (uintptr_t)from, HOST, bytes);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    TRY(wait_for_work());
    return copy((uintptr_t)to, HOST, from, DEVICE, bytes);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    TRY(wait_for_work());
    return copy(to, DEVICE, from, DEVICE, bytes);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    TRY(wait_for_work());
    return copy_unified(to, from, bytes);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
    TRY(wait_for_work());
    if (!context_valid(to_context) || !context_valid(from_context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy(to, DEVICE, from, DEVICE, bytes);
}

/* ---- in a stream's turn ---- */

static CUresult copy_on(CUmemorytype to_type, uintptr_t to, CUmemorytype from_type, uintptr_t from, size_t bytes,
                        CUstream stream) {
    CUDA_MEMCPY3D what = {.srcMemoryType = from_type,
                          .srcHost = (void *)from,
                          .srcDevice = from,
                          .dstMemoryType = to_type,
                          .dstHost = (void *)to,
                          .dstDevice = to,
                          .WidthInBytes = bytes,
                          .Height = 1,
                          .Depth = 1};
    return box_copy_on(&what, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return copy_on(CU_MEMORYTYPE_DEVICE, to, CU_MEMORYTYPE_HOST, (uintptr_t)from, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_on(CU_MEMORYTYPE_HOST, (uintptr_t)to, CU_MEMORYTYPE_DEVICE, from, bytes, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_on(CU_MEMORYTYPE_DEVICE, to, CU_MEMORYTYPE_DEVICE, from, bytes, stream);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_on(CU_MEMORYTYPE_UNIFIED, to, CU_MEMORYTYPE_UNIFIED, from, bytes, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
                           CUstream stream) {
    TRY(driver_ready());
    if (!context_valid(to_context) || !context_valid(from_context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}
