/* Allocations: host memory under the name of device memory, charged to a card.
 *
 * A device pointer is a host pointer. The kernel backs a page when it is first touched, so that an
 * allocation of gigabytes costs nothing until it is written. */
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_memory.h"
#include "driver.h"
#include "timeline.h"

#define GRANULE 512       /* bytes; what a card gives out at least */
#define MAP_FROM 65536    /* of the host's memory; smaller ones share pages: a process may hold only so many mappings */
#define PITCH 512         /* bytes */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree; /* of struct allocation, by address; two ranges that overlap count as equal */
static struct allocation *first;
static uint64_t last_id;

static int by_range(const void *left, const void *right)
{
    const struct allocation *a = left, *b = right;
    if (a->base + a->size <= b->base)
        return -1;
    return b->base + b->size <= a->base;
}

static struct allocation *holding(uintptr_t address)
{
    struct allocation key = {.base = address, .size = 1};
    struct allocation **found = tfind(&key, &tree, by_range);
    return found ? *found : NULL;
}

static void unlink_allocation(struct allocation *held)
{
    tdelete(held, &tree, by_range);
    if (held->previous)
        held->previous->next = held->next;
    else
        first = held->next;
    if (held->next)
        held->next->previous = held->previous;
}

CUresult memory_link(const struct allocation *filled)
{
    struct allocation *held = malloc(sizeof *held);
    if (!held)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *held = *filled;
    pthread_mutex_lock(&lock);
    struct allocation **found = tsearch(held, &tree, by_range);
    bool taken = found && *found != held;
    if (found && !taken) {
        held->id = ++last_id;
        held->previous = NULL;
        held->next = first;
        if (first)
            first->previous = held;
        first = held;
    }
    pthread_mutex_unlock(&lock);
    if (found && !taken)
        return CUDA_SUCCESS;
    free(held);
    return taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_OUT_OF_MEMORY;
}

static void give_back(const struct allocation *held)
{
    if (held->kind == MEMORY_MAPPED) {
        mapping_give_back(held);
        return;
    }
    if (held->kind == MEMORY_GRAPH) {
        graph_give_back(held);
        return;
    }
    if (held->kind == MEMORY_IMPORTED)
        import_give_back(held->base, held->size);
    else if (held->kind == MEMORY_DEVICE && held->base && !held->pool && import_outlives(held))
        return;
    else if (held->base && (held->kind == MEMORY_DEVICE || held->kind == MEMORY_ARRAY))
        arena_give_back(held->base, held->charged, held->offset);
    else if (held->mapped)
        munmap((void *)held->base, held->mapped);
    else if (held->kind != MEMORY_REGISTERED)
        free((void *)held->base);
    if (held->pool)
        pool_give_back(held->pool, held->charged);
    else if (held->charged)
        sim_memory_release(held->card, held->charged);
}

static void *back(size_t bytes, size_t *mapped)
{
    void *base = NULL;
    if (bytes < MAP_FROM) {
        *mapped = 0;
        return posix_memalign(&base, GRANULE, bytes) == 0 ? base : NULL;
    }
    *mapped = bytes;
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

static CUresult make(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags,
                     struct allocation *out)
{
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    *out = (struct allocation){.size = bytes, .kind = kind, .flags = flags, .context = context,
                               .card = context->card, .device = context->device,
                               .pool = out->pool};
    if (kind != MEMORY_HOST || out->pool) {
        if (!out->pool)
            pools_settle();
        if (!(out->pool ? pool_take(out->pool, whole) : sim_memory_charge(context->card, whole)))
            return node_owns_slot() ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_SYSTEM_NOT_READY;
        out->charged = whole;
    }
    out->shared = kind == MEMORY_DEVICE || kind == MEMORY_ARRAY;
    out->base = out->shared ? arena_take(whole, out->card, &out->offset)
                            : (uintptr_t)back(whole, &out->mapped);
    CUresult result = out->base ? memory_link(out) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        give_back(out);
    return result;
}

CUresult memory_new(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags,
                    struct allocation *out)
{
    out->pool = NULL;
    return make(context, kind, bytes, flags, out);
}

CUresult memory_new_in_pool(CUcontext context, size_t bytes, CUmemoryPool pool, bool host,
                            struct allocation *out)
{
    out->pool = pool;
    return make(context, host ? MEMORY_HOST : MEMORY_DEVICE, bytes, 0, out);
}

CUresult memory_register(CUcontext context, void *base, size_t bytes, unsigned flags)
{
    if (!base || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation held = {.base = (uintptr_t)base, .size = bytes, .kind = MEMORY_REGISTERED,
                              .flags = flags, .context = context, .card = context->card,
                              .device = context->device};
    return memory_link(&held);
}

CUresult memory_drop(uintptr_t base, unsigned kinds)
{
    pthread_mutex_lock(&lock);
    struct allocation *held = holding(base);
    bool fits = held && held->base == base && kinds & 1u << held->kind;
    if (fits)
        unlink_allocation(held);
    pthread_mutex_unlock(&lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    give_back(held);
    free(held);
    return CUDA_SUCCESS;
}

void memory_drop_context(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct allocation *held = first, *next; held; held = next) {
        next = held->next;
        if (held->context != context)
            continue;
        unlink_allocation(held);
        give_back(held);
        free(held);
    }
    pthread_mutex_unlock(&lock);
}

bool memory_find(uintptr_t address, struct allocation *found)
{
    pthread_mutex_lock(&lock);
    const struct allocation *held = holding(address);
    if (held && held->kind == MEMORY_ARRAY)
        held = NULL;
    if (held)
        *found = *held;
    pthread_mutex_unlock(&lock);
    return held;
}

static bool open_to(const struct allocation *held, bool write)
{
    if (held->kind != MEMORY_MAPPED)
        return true;
    unsigned wanted = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    for (unsigned who = 0; who <= HOST_ACCESS; who++)
        if ((held->access[who] & wanted) == wanted)
            return true;
    return false;
}

bool memory_holds(uintptr_t address, size_t bytes, bool write)
{
    bool fits = false;
    pthread_mutex_lock(&lock);
    for (const struct allocation *held; (held = holding(address)) && open_to(held, write);) {
        size_t rest = held->size - (address - held->base);
        fits = bytes <= rest && held->kind != MEMORY_ARRAY;
        if (fits || held->kind != MEMORY_MAPPED)
            break;
        bytes -= rest;
        address += rest;
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

CUresult memory_set_access(uintptr_t base, unsigned who, CUmemAccess_flags flags)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct allocation *held = holding(base);
    if (held && held->base == base && held->kind == MEMORY_MAPPED) {
        held->access[who] = (uint8_t)flags;
        unsigned all = 0;
        for (unsigned i = 0; i <= HOST_ACCESS; i++)
            all |= held->access[i];
        int protection = (all & 1 ? PROT_READ : 0) | (all & 2 ? PROT_WRITE : 0);
        if (mprotect((void *)base, held->size, protection) == 0)
            result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The child inherits copies of the parent's pages, but none of its allocations. */
void memory_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    tree = NULL;
    first = NULL;
}

/* ---- the calls ---- */

#define DEVICE_KINDS (1u << MEMORY_DEVICE | 1u << MEMORY_MANAGED | 1u << MEMORY_GRAPH)

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUcontext context;
    TRY(context_current(&context));
    pools_settle();
    uint64_t whole = node_state->cards[context->card].memory_bytes;
    uint64_t used = sim_memory_total(context->card);
    if (free_bytes)
        *free_bytes = used < whole ? whole - used : 0;
    if (total)
        *total = whole;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
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

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                            unsigned int element)
{
    if (!pitch || width == 0 || height == 0 || width > SIZE_MAX / 2 ||
        (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (height > SIZE_MAX / row)
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(cuMemAlloc_v2(pointer, row * height));
    *pitch = row;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    CUcontext context;
    struct allocation made;
    TRY(context_current(&context));
    if (!pointer || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(memory_new(context, MEMORY_MANAGED, bytes, flags, &made));
    *pointer = made.base;
    return CUDA_SUCCESS;
}

/* Waits for all work first, as the real one does: a kernel may be using the memory. */
CUresult cuMemFree_v2(CUdeviceptr pointer)
{
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

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer)
{
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

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    CUcontext context;
    struct allocation made;
    TRY(context_current(&context));
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(memory_new(context, MEMORY_HOST, bytes, flags, &made));
    *pointer = (void *)made.base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    return cuMemHostAlloc(pointer, bytes, 0);
}

CUresult cuMemFreeHost(void *pointer)
{
    TRY(driver_ready());
    return pointer ? memory_drop((uintptr_t)pointer, 1u << MEMORY_HOST) : CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *host, unsigned int flags)
{
    struct allocation held;
    TRY(driver_ready());
    if (!pointer || flags != 0 || !memory_find((uintptr_t)host, &held))
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = (uintptr_t)host;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *host)
{
    struct allocation held;
    TRY(driver_ready());
    if (!flags || !memory_find((uintptr_t)host, &held) || held.kind != MEMORY_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = held.flags;
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags)
{
    CUcontext context;
    TRY(context_current(&context));
    return memory_register(context, pointer, bytes, flags);
}

CUresult cuMemHostUnregister(void *pointer)
{
    TRY(driver_ready());
    CUresult result = memory_drop((uintptr_t)pointer, 1u << MEMORY_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
