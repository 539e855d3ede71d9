/* Linear device memory, managed memory and page-locked host memory. */
#include <stdio.h>

#include "driver.h"
#include "sim_memory.h"
#include "timeline.h"

#define PITCH 512 /* bytes */

#define DEVICE_KINDS (1u << MEMORY_DEVICE | 1u << MEMORY_MANAGED | 1u << MEMORY_GRAPH)

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CUcontext context;
    TRY(context_current(&context));
    pools_settle();
    uint32_t mark = sim_memory_mark(context->card);
    uint64_t whole = sim_memory_size(context->card, mark);
    uint64_t used = sim_memory_used(context->card, mark);
    if (free_bytes)
        *free_bytes = used < whole ? whole - used : 0;
    if (total)
        *total = whole;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    CUcontext context;
    struct allocation made;
    TRY(context_current(&context));
    TRY(capture_unsafe());
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(memory_new(context, MEMORY_DEVICE, bytes, 0, &made));
    *pointer = made.base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    if (!pitch || width == 0 || height == 0 || width > SIZE_MAX / 2 || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (height > SIZE_MAX / row)
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(cuMemAlloc_v2(pointer, row * height));
    *pitch = row;
    return CUDA_SUCCESS;
}

/* Bytes of the machine's memory that programs can still take; SIZE_MAX where the kernel does not say. */
static size_t host_available(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long kib = 0;
    while (file && kib == 0 && fgets(line, sizeof line, file))
        sscanf(line, "MemAvailable: %lu kB", &kib);
    if (file)
        fclose(file);
    return kib ? (size_t)kib << 10 : SIZE_MAX;
}

/* A program touches all of what it shares with the device, and that takes this machine's own memory. */
static bool host_has(size_t bytes) {
    size_t most = (size_t)environment_number("FENKA_SIMULATED_MANAGED_MIB", 0) << 20;
    size_t free_bytes = host_available();
    if (bytes <= (most ? most : free_bytes / 2))
        return true;
    fprintf(
        stderr,
        "fenka: simulated managed memory is this machine's own: %zu MiB are asked for, and %zu MiB are free, of which "
        "one allocation may take half. Ask for less, or set FENKA_SIMULATED_MANAGED_MIB to the most that one may "
        "take\n",
        bytes >> 20, free_bytes >> 20);
    return false;
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    CUcontext context;
    struct allocation made;
    TRY(context_current(&context));
    if (!pointer || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    if (!host_has(bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(memory_new(context, MEMORY_MANAGED, bytes, flags, &made));
    *pointer = made.base;
    return CUDA_SUCCESS;
}

/* Waits for all work first, like the real driver: a kernel may be using the memory. */
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    struct allocation held;
    TRY(driver_ready());
    if (pointer == 0)
        return CUDA_SUCCESS;
    TRY(capture_unsafe());
    if (!memory_find(pointer, &held))
        return CUDA_ERROR_INVALID_VALUE;
    if (held.context)
        timeline_wait(timeline_own(held.context->card, stream_end(held.context, NULL)));
    return memory_drop(pointer, DEVICE_KINDS | (held.pool ? 1u << MEMORY_HOST : 0));
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    struct allocation held;
    TRY(driver_ready());
    if (!memory_find(pointer, &held))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = held.base;
    if (size)
        *size = held.size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    CUcontext context;
    struct allocation made;
    TRY(context_current(&context));
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(memory_new(context, MEMORY_HOST, bytes, flags, &made));
    *pointer = (void *)made.base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

CUresult cuMemFreeHost(void *pointer) {
    TRY(driver_ready());
    return pointer ? memory_drop((uintptr_t)pointer, 1u << MEMORY_HOST) : CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *host, unsigned int flags) {
    struct allocation held;
    TRY(driver_ready());
    if (!pointer || flags != 0 || !memory_find((uintptr_t)host, &held))
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = (uintptr_t)host;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *host) {
    struct allocation held;
    TRY(driver_ready());
    if (!flags || !memory_find((uintptr_t)host, &held) || held.kind != MEMORY_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = held.flags;
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
    CUcontext context;
    TRY(context_current(&context));
    return memory_register(context, pointer, bytes, flags);
}

CUresult cuMemHostUnregister(void *pointer) {
    TRY(driver_ready());
    CUresult result = memory_drop((uintptr_t)pointer, 1u << MEMORY_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
