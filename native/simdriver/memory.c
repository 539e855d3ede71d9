/* All allocations of the process, by address.
 *
 * A device pointer is a host pointer. The kernel backs a page when it is first touched, so an allocation of gigabytes
 * costs nothing until it is written. */
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"
#include "pools.h"
#include "sim_memory.h"

#define MAP_FROM 65536 /* smaller host allocations share pages: a process may have only so many mappings */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree; /* of struct allocation, by address; two ranges that overlap count as equal */
static struct allocation *first;
static uint64_t last_id;

static int by_range(const void *left, const void *right) {
    const struct allocation *a = left, *b = right;
    if (a->base + a->size <= b->base)
        return -1;
    return b->base + b->size <= a->base;
}

static struct allocation *allocation_at(uintptr_t address) {
    struct allocation key = {.base = address, .size = 1};
    struct allocation **found = tfind(&key, &tree, by_range);
    return found ? *found : NULL;
}

static void unlink_allocation(struct allocation *held) {
    tdelete(held, &tree, by_range);
    if (held->previous)
        held->previous->next = held->next;
    else
        first = held->next;
    if (held->next)
        held->next->previous = held->previous;
}

CUresult memory_link(const struct allocation *filled) {
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

/* Small pieces of managed memory share blocks with those of the device. */
static bool in_arena(enum memory_kind kind, size_t taken) {
    return kind == MEMORY_DEVICE || kind == MEMORY_ARRAY || (kind == MEMORY_MANAGED && taken < ARENA_MAPS_FROM);
}

static void release(const struct allocation *held) {
    if (held->release) {
        held->release(held);
        return;
    }
    if (held->kind == MEMORY_DEVICE && held->base && !held->pool && import_outlives(held))
        return;
    else if (held->base && in_arena(held->kind, held->charged))
        arena_give_back(held->base, held->charged, held->offset);
    else if (held->mapped && held->kind == MEMORY_MANAGED)
        addresses_give_back(held->base, held->mapped);
    else if (held->mapped)
        munmap((void *)held->base, held->mapped);
    else if (held->kind != MEMORY_REGISTERED)
        free((void *)held->base);
    if (held->pool)
        pool_give_back(held->pool, held->charged);
    else if (held->charged)
        sim_memory_release(held->card, held->charged);
}

static void *back(size_t bytes, size_t *mapped) {
    void *base = NULL;
    if (bytes < MAP_FROM) {
        *mapped = 0;
        return posix_memalign(&base, CARD_GRANULE, bytes) == 0 ? base : NULL;
    }
    *mapped = bytes;
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

/* At an address that is never the host's. */
static uintptr_t back_managed(size_t bytes, size_t *mapped) {
    uintptr_t base = addresses_take(bytes, CARD_GRANULE, 0);
    *mapped = bytes;
    if (!base || mprotect((void *)base, bytes, PROT_READ | PROT_WRITE) == 0)
        return base;
    addresses_give_back(base, bytes);
    return 0;
}

static CUresult make(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags, struct allocation *out) {
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t whole = kind == MEMORY_HOST || out->pool ? rounded_up(bytes, CARD_GRANULE) : sim_memory_taken(bytes);
    *out = (struct allocation){.size = bytes,
                               .kind = kind,
                               .flags = flags,
                               .context = context,
                               .card = context->card,
                               .device = context->device,
                               .pool = out->pool};
    if (out->pool && out->pool->device >= 0) { /* perhaps another card's than the context's */
        out->card = out->pool->card;
        out->device = out->pool->device;
    }
    if (kind != MEMORY_HOST || out->pool) {
        if (!out->pool)
            pools_settle();
        if (!(out->pool ? pool_take(out->pool, whole) : sim_memory_charge(context->card, whole)))
            return node_owns_slot() ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_SYSTEM_NOT_READY;
        out->charged = whole;
    }
    out->shared = kind == MEMORY_DEVICE || kind == MEMORY_ARRAY;
    if (in_arena(kind, whole))
        out->base = arena_take(whole, out->card, &out->offset);
    else
        out->base = kind == MEMORY_MANAGED ? back_managed(whole, &out->mapped) : (uintptr_t)back(whole, &out->mapped);
    CUresult result = out->base ? memory_link(out) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        release(out);
    return result;
}

CUresult memory_new(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags, struct allocation *out) {
    out->pool = NULL;
    return make(context, kind, bytes, flags, out);
}

CUresult memory_new_in_pool(CUcontext context, size_t bytes, CUmemoryPool pool, enum memory_kind kind,
                            struct allocation *out) {
    out->pool = pool;
    return make(context, kind, bytes, 0, out);
}

CUresult memory_register(CUcontext context, void *base, size_t bytes, unsigned flags) {
    if (!base || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation held = {.base = (uintptr_t)base,
                              .size = bytes,
                              .kind = MEMORY_REGISTERED,
                              .flags = flags,
                              .context = context,
                              .card = context->card,
                              .device = context->device};
    return memory_link(&held);
}

CUresult memory_drop(uintptr_t base, unsigned kinds) {
    pthread_mutex_lock(&lock);
    struct allocation *held = allocation_at(base);
    bool fits = held && held->base == base && kinds & 1u << held->kind;
    if (fits)
        unlink_allocation(held);
    pthread_mutex_unlock(&lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    release(held);
    free(held);
    return CUDA_SUCCESS;
}

void memory_drop_context(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (struct allocation *held = first, *next; held; held = next) {
        next = held->next;
        if (held->context != context)
            continue;
        unlink_allocation(held);
        release(held);
        free(held);
    }
    pthread_mutex_unlock(&lock);
}

bool memory_find(uintptr_t address, struct allocation *found) {
    pthread_mutex_lock(&lock);
    const struct allocation *held = allocation_at(address);
    if (held && held->kind == MEMORY_ARRAY)
        held = NULL;
    if (held)
        *found = *held;
    pthread_mutex_unlock(&lock);
    return held;
}

static bool open_to(const struct allocation *held, bool write) {
    if (held->kind != MEMORY_MAPPED)
        return true;
    unsigned wanted = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    for (unsigned who = 0; who <= HOST_ACCESS; who++)
        if ((held->access[who] & wanted) == wanted)
            return true;
    return false;
}

bool memory_holds(uintptr_t address, size_t bytes, bool write) {
    bool fits = false;
    pthread_mutex_lock(&lock);
    for (const struct allocation *held; (held = allocation_at(address)) && open_to(held, write);) {
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

CUresult memory_set_access(uintptr_t base, unsigned who, CUmemAccess_flags flags) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct allocation *held = allocation_at(base);
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
void memory_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    tree = NULL;
    first = NULL;
}
