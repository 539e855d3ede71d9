/* Copies. They are real, and done when the call returns; on the card's line they take no time. */
#include <string.h>

#include "driver.h"

#define DEVICE true
#define HOST false

/* A copy that blocks comes after all the work before it. */
static CUresult wait_for_work(void)
{
    CUcontext context;
    TRY(context_current(&context));
    stream_wait(context, NULL);
    return CUDA_SUCCESS;
}

static CUresult on_stream(CUstream stream)
{
    CUcontext context;
    return stream_resolve(stream, &context, &stream);
}

static CUresult copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t bytes)
{
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (!to || !from || (to_device && !memory_holds(to, bytes, true)) ||
        (from_device && !memory_holds(from, bytes, false)))
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

/* Any address may be meant: one that the driver knows must hold the bytes, another is the host's. */
static CUresult copy_unified(uintptr_t to, uintptr_t from, size_t bytes)
{
    struct allocation held;
    return copy(to, memory_find(to, &held), from, memory_find(from, &held), bytes);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    TRY(wait_for_work());
    return copy(to, DEVICE, (uintptr_t)from, HOST, bytes);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    TRY(wait_for_work());
    return copy((uintptr_t)to, HOST, from, DEVICE, bytes);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    TRY(wait_for_work());
    return copy(to, DEVICE, from, DEVICE, bytes);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    TRY(wait_for_work());
    return copy_unified(to, from, bytes);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                      size_t bytes)
{
    TRY(wait_for_work());
    if (!context_valid(to_context) || !context_valid(from_context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy(to, DEVICE, from, DEVICE, bytes);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    TRY(on_stream(stream));
    return copy(to, DEVICE, (uintptr_t)from, HOST, bytes);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    TRY(on_stream(stream));
    return copy((uintptr_t)to, HOST, from, DEVICE, bytes);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    TRY(on_stream(stream));
    return copy(to, DEVICE, from, DEVICE, bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    TRY(on_stream(stream));
    return copy_unified(to, from, bytes);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t bytes, CUstream stream)
{
    TRY(on_stream(stream));
    if (!context_valid(to_context) || !context_valid(from_context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy(to, DEVICE, from, DEVICE, bytes);
}

/* ---- rectangles ---- */

struct side {
    uintptr_t base;
    size_t pitch;
    bool device;
};

static CUresult resolve_side(CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch,
                             size_t x, size_t y, size_t width, struct side *side)
{
    struct allocation held;
    if (type == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED;
    side->base = type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : (uintptr_t)device;
    side->device = type == CU_MEMORYTYPE_DEVICE ||
                   (type == CU_MEMORYTYPE_UNIFIED && memory_find(side->base, &held));
    side->pitch = pitch ? pitch : width;
    if (!side->base || side->pitch < x + width)
        return CUDA_ERROR_INVALID_VALUE;
    side->base += y * side->pitch + x;
    return CUDA_SUCCESS;
}

static CUresult copy_rectangle(const CUDA_MEMCPY2D *what)
{
    struct side to, from;
    if (!what)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(resolve_side(what->dstMemoryType, what->dstHost, what->dstDevice, what->dstPitch,
                     what->dstXInBytes, what->dstY, what->WidthInBytes, &to));
    TRY(resolve_side(what->srcMemoryType, what->srcHost, what->srcDevice, what->srcPitch,
                     what->srcXInBytes, what->srcY, what->WidthInBytes, &from));
    for (size_t row = 0; row < what->Height; row++)
        TRY(copy(to.base + row * to.pitch, to.device, from.base + row * from.pitch, from.device,
                 what->WidthInBytes));
    return CUDA_SUCCESS;
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *what)
{
    TRY(wait_for_work());
    return copy_rectangle(what);
}

CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *what)
{
    TRY(wait_for_work());
    return copy_rectangle(what);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *what, CUstream stream)
{
    TRY(on_stream(stream));
    return copy_rectangle(what);
}
