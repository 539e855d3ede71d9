/* Virtual memory management: address ranges, and mappings of physical memory into them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "vmm.h"

struct reservation {
    uintptr_t base;
    size_t size, mapped;
    struct reservation *next;
};

static struct reservation *reservations;

void mappings_after_fork(void) { reservations = NULL; }

/* ---- the addresses ---- */

#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    TRY(driver_ready());
    if (!pointer || size == 0 || size % GRANULARITY != 0 || (alignment & (alignment - 1)) != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    if (size > SIZE_MAX / 4 || alignment > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct reservation *made = malloc(sizeof *made);
    uintptr_t base = made ? addresses_take(size, alignment, (uintptr_t)wish) : 0;
    if (!base) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    vmm_lock();
    *made = (struct reservation){base, size, 0, reservations};
    reservations = made;
    vmm_unlock();
    *pointer = base;
    return CUDA_SUCCESS;
}

/* Under the lock. The link to the reservation that contains the whole range. */
static struct reservation **reservation_of(uintptr_t base, size_t size) {
    struct reservation **place = &reservations;
    while (*place && (base < (*place)->base || base - (*place)->base > (*place)->size ||
                      size > (*place)->size - (base - (*place)->base)))
        place = &(*place)->next;
    return place;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    TRY(driver_ready());
    vmm_lock();
    struct reservation **place = reservation_of(pointer, size), *found = *place;
    bool fits = found && found->base == pointer && found->size == size && found->mapped == 0;
    if (fits) {
        *place = found->next;
        addresses_give_back(found->base, found->size);
        free(found);
    }
    vmm_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- the tie ---- */

static void release_mapping(const struct allocation *held) {
    vmm_lock();
    mmap((void *)held->base, held->size, PROT_NONE, NOTHING | MAP_FIXED, -1, 0);
    struct reservation *around = *reservation_of(held->base, held->size);
    if (around)
        around->mapped -= held->size;
    held->handle->mappings--;
    vmm_drop_if_unused(held->handle);
    vmm_unlock();
}

/* Under the lock. */
static CUresult map(struct memory_handle *handle, uintptr_t base, size_t size) {
    bool device = on_device(&handle->properties);
    struct allocation held = {.base = base,
                              .size = size,
                              .kind = MEMORY_MAPPED,
                              .card = handle->card,
                              .release = release_mapping,
                              .device = device ? handle->properties.location.id : -1,
                              .handle = handle,
                              .shared = true};
    /* The entry first: it is refused if something is mapped there already. */
    if (memory_link(&held) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    handle->mappings++;
    if (mmap((void *)base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->file, handle->offset) != MAP_FAILED)
        return CUDA_SUCCESS;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    TRY(driver_ready());
    if (size == 0 || size % GRANULARITY != 0 || pointer % GRANULARITY != 0 || offset != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    vmm_lock();
    struct memory_handle *found = vmm_handle(handle);
    struct reservation *around = *reservation_of(pointer, size);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (found && around && size <= found->size) {
        result = map(found, pointer, size);
        if (result != CUDA_ERROR_INVALID_VALUE)
            around->mapped += size;
    }
    vmm_unlock();
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        memory_drop(pointer, 1u << MEMORY_MAPPED);
    return result;
}

/* Whether the range consists of whole mappings without gaps. */
static bool whole_mappings(uintptr_t base, size_t size) {
    struct allocation held;
    uintptr_t at = base;
    while (at < base + size) {
        if (!memory_find(at, &held) || held.kind != MEMORY_MAPPED || held.base != at)
            return false;
        at += held.size;
    }
    return size > 0 && at == base + size;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    struct allocation held;
    TRY(driver_ready());
    if (!whole_mappings(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (uintptr_t at = pointer; at < pointer + size; at += held.size) {
        if (!memory_find(at, &held))
            return CUDA_ERROR_INVALID_VALUE;
        TRY(memory_drop(at, 1u << MEMORY_MAPPED));
    }
    return CUDA_SUCCESS;
}

static CUresult who_is(const CUmemLocation *location, unsigned *who) {
    uint32_t card;
    *who = HOST_ACCESS;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        TRY(device_card(location->id, &card));
        *who = (unsigned)location->id;
    } else if ((unsigned)location->type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT ||
               location->type == CU_MEM_LOCATION_TYPE_INVALID) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *wishes, size_t count) {
    struct allocation held;
    unsigned who;
    TRY(driver_ready());
    if (!wishes || count == 0 || !whole_mappings(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        TRY(who_is(&wishes[i].location, &who));
        if (wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
            wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (uintptr_t at = pointer; at < pointer + size; at += held.size) {
        if (!memory_find(at, &held))
            return CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; i < count; i++) {
            TRY(who_is(&wishes[i].location, &who));
            TRY(memory_set_access(at, who, wishes[i].flags));
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
    struct allocation held;
    unsigned who;
    TRY(driver_ready());
    if (!flags || !location || !memory_find(pointer, &held) || held.kind != MEMORY_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(who_is(location, &who));
    *flags = held.access[who];
    return CUDA_SUCCESS;
}
