/* Filling memory. */
#include <string.h>
#include <sys/mman.h>

#include "graph.h"

#define PAGE 4096
#define MIN_DROPPED (1u << 20)

static CUresult ready(void) {
    CUcontext context;
    TRY(context_current(&context));
    TRY(capture_unsafe());
    stream_wait(context, NULL);
    return CUDA_SUCCESS;
}

/* Zeroed pages are returned to the kernel, which provides zeroed pages on access: filling gigabytes with zeros, as
 * frameworks do, must not cost gigabytes. */
static void zero(uintptr_t at, size_t bytes) {
    uintptr_t from = (at + PAGE - 1) / PAGE * PAGE, to = (at + bytes) / PAGE * PAGE;
    struct allocation held;
    bool ours = memory_find(at, &held) && (held.mapped || held.shared);
    int drop = ours && held.shared ? MADV_REMOVE : MADV_DONTNEED;
    if (!ours || bytes < MIN_DROPPED || madvise((void *)from, to - from, drop) != 0) {
        memset((void *)at, 0, bytes);
        return;
    }
    memset((void *)at, 0, from - at);
    memset((void *)to, 0, at + bytes - to);
}

/* The pattern is repeated `count` times; `width` is its size in bytes: 1, 2 or 4. */
static CUresult fill(uintptr_t at, uint32_t pattern, size_t width, size_t count) {
    if (count == 0)
        return CUDA_SUCCESS;
    if (at % width != 0 || count > SIZE_MAX / width || !memory_holds(at, count * width, true))
        return CUDA_ERROR_INVALID_VALUE;
    if (pattern == 0)
        zero(at, count * width);
    else if (width == 1)
        memset((void *)at, (int)pattern, count);
    else
        for (size_t i = 0; i < count; i++)
            memcpy((void *)(at + i * width), &pattern, width);
    return CUDA_SUCCESS;
}

static CUresult fill_rows(uintptr_t at, size_t pitch, uint32_t pattern, size_t width, size_t columns, size_t rows) {
    if (pitch < columns * width && rows > 1)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < rows; row++)
        TRY(fill(at + row * pitch, pattern, width, columns));
    return CUDA_SUCCESS;
}

CUresult set_rows(const CUDA_MEMSET_NODE_PARAMS *what) {
    size_t width = what->elementSize;
    uint32_t mask = width == 4 ? UINT32_MAX : (1u << width * 8) - 1;
    return fill_rows(what->dst, what->pitch, what->value & mask, width, what->width, what->height);
}

static CUresult fill_on(CUdeviceptr at, size_t pitch, uint32_t pattern, unsigned width, size_t columns, size_t rows,
                        CUstream stream) {
    CUcontext context;
    bool taken;
    TRY(stream_resolve(stream, &context, &stream));
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEMSET, .set = {at, pitch, pattern, width, columns, rows}};
    TRY(capture_work(context, stream, &work, &taken));
    return taken ? CUDA_SUCCESS : set_rows(&work.set);
}

#define DEFINE(bits, type)                                                                                   \
    CUresult cuMemsetD##bits##_v2(CUdeviceptr at, type value, size_t count) {                                \
        TRY(ready());                                                                                        \
        return fill(at, value, sizeof value, count);                                                         \
    }                                                                                                        \
    CUresult cuMemsetD##bits##Async(CUdeviceptr at, type value, size_t count, CUstream stream) {             \
        return fill_on(at, 0, value, sizeof value, count, 1, stream);                                        \
    }                                                                                                        \
    CUresult cuMemsetD2D##bits##_v2(CUdeviceptr at, size_t pitch, type value, size_t width, size_t height) { \
        TRY(ready());                                                                                        \
        return fill_rows(at, pitch, value, sizeof value, width, height);                                     \
    }                                                                                                        \
    CUresult cuMemsetD2D##bits##Async(CUdeviceptr at, size_t pitch, type value, size_t width, size_t height, \
                                      CUstream stream) {                                                     \
        return fill_on(at, pitch, value, sizeof value, width, height, stream);                               \
    }

DEFINE(8, unsigned char)
DEFINE(16, unsigned short)
DEFINE(32, unsigned int)
