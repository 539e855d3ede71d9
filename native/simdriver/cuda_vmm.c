/* Virtual memory management: addresses, memory and the tie between the two are three things.
 *
 * Memory without a shareable type lies in the arena; memory that can be shared has a file of its own.
 * Whoever was given such a file holds a lock on it, which the kernel drops with the last descriptor and
 * the last mapping, however their process ends: so its creator learns, and only then discharges it; and
 * where the creator ends first, the card server. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_memory.h"
#include "driver.h"

#define GRANULARITY (2u << 20)
#define TRAILER_BYTES 4096
#define TRAILER_MAGIC 0x4d4d56616b6e6566 /* "fenkaVMM" */
#define WAITER_STACK (64u << 10)

struct memory_handle {
    struct object object;
    CUmemAllocationProp properties;
    uint32_t card;
    size_t size, charged;
    int file;
    int line; /* to the card server, once it was exported */
    off_t offset;
    unsigned references, mappings;
    bool own_file, exported;
};

/* Behind the memory in a file that can be shared. */
struct trailer {
    uint64_t magic;
    CUmemAllocationProp properties;
    char card_uuid[48];
};

struct reservation {
    uintptr_t base;
    size_t size, mapped;
    struct reservation *next;
};

/* Taken before the lock of cuda_memory.c, where both are. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct reservation *reservations;

void mappings_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    reservations = NULL;
}

/* ---- the memory ---- */

static bool on_device(const CUmemAllocationProp *properties)
{
    return properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static CUresult check_properties(const CUmemAllocationProp *properties, uint32_t *card)
{
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    *card = 0;
    switch ((int)properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return device_card(properties->location.id, card);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return driver_ready();
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static bool back_with_own_file(struct memory_handle *handle)
{
    struct trailer trailer = {.magic = TRAILER_MAGIC, .properties = handle->properties};
    if (on_device(&handle->properties))
        snprintf(trailer.card_uuid, sizeof trailer.card_uuid, "%s",
                 node_state->cards[handle->card].uuid);
    handle->own_file = true;
    handle->file = memory_file("fenka-memory");
    if (handle->file < 0)
        return false;
    if (ftruncate(handle->file, (off_t)handle->size + TRAILER_BYTES) == 0 &&
        pwrite(handle->file, &trailer, sizeof trailer, (off_t)handle->size) ==
            (ssize_t)sizeof trailer)
        return true;
    close(handle->file);
    return false;
}

static bool back_with_arena(struct memory_handle *handle)
{
    handle->file = arena_reserve(handle->size, handle->card, &handle->offset);
    return handle->file >= 0;
}

/* The server needs to know no longer: this process has seen the memory go. */
static void unkeep(const struct memory_handle *handle)
{
    if (handle->exported && handle->line >= 0)
        close(handle->line);
}

static void *wait_for_importers(void *argument)
{
    struct memory_handle *handle = argument;
    while (flock(handle->file, LOCK_EX) != 0 && errno == EINTR)
        ;
    close(handle->file);
    sim_memory_release(handle->card, handle->charged);
    unkeep(handle);
    object_delete(handle);
    return NULL;
}

static bool leave_to_importers(struct memory_handle *handle)
{
    pthread_t thread;
    pthread_attr_t attributes;
    if (flock(handle->file, LOCK_EX | LOCK_NB) == 0)
        return false;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WAITER_STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    bool left = pthread_create(&thread, &attributes, wait_for_importers, handle) == 0;
    pthread_attr_destroy(&attributes);
    return left;
}

/* Under the lock, after a reference or a mapping has gone. */
static void drop_if_unused(struct memory_handle *handle)
{
    if (handle->references > 0 || handle->mappings > 0)
        return;
    if (handle->exported && handle->charged > 0 && leave_to_importers(handle))
        return;
    if (handle->own_file)
        close(handle->file);
    else
        arena_punch(handle->offset, handle->size);
    if (handle->charged)
        sim_memory_release(handle->card, handle->charged);
    unkeep(handle);
    object_delete(handle);
}

/* Under the lock. One that was released and is merely still mapped is no handle any more. */
static struct memory_handle *known(CUmemGenericAllocationHandle handle)
{
    struct memory_handle *found = object_get((void *)(uintptr_t)handle, HANDLE);
    return found && found->references > 0 ? found : NULL;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    uint32_t card;
    TRY(check_properties(properties, &card));
    if (!out || size == 0 || size % GRANULARITY != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct memory_handle *handle = object_new(HANDLE, sizeof *handle, NULL);
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    handle->properties = *properties;
    handle->card = card;
    handle->size = size;
    handle->charged = on_device(properties) ? size : 0;
    if (handle->charged && !sim_memory_charge(card, size)) {
        object_delete(handle);
        return node_owns_slot() ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_SYSTEM_NOT_READY;
    }
    pthread_mutex_lock(&lock);
    bool backed = properties->requestedHandleTypes ? back_with_own_file(handle)
                                                   : back_with_arena(handle);
    handle->references = backed;
    pthread_mutex_unlock(&lock);
    if (!backed) {
        sim_memory_release(card, handle->charged);
        object_delete(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(driver_ready());
    pthread_mutex_lock(&lock);
    struct memory_handle *found = known(handle);
    if (found) {
        found->references--;
        drop_if_unused(found);
    }
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    struct allocation held;
    TRY(driver_ready());
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool mapped = memory_find((uintptr_t)address, &held) && held.kind == MEMORY_MAPPED;
    if (mapped) {
        held.handle->references++;
        *handle = (uintptr_t)held.handle;
    }
    pthread_mutex_unlock(&lock);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags which)
{
    uint32_t card;
    TRY(check_properties(properties, &card));
    if (!granularity || (which != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                         which != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle)
{
    TRY(driver_ready());
    pthread_mutex_lock(&lock);
    struct memory_handle *found = properties ? known(handle) : NULL;
    if (found)
        *properties = found->properties;
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- sharing ---- */

/* An opening of its own, because a lock belongs to the opening and not to the descriptor. */
static int open_locked(int file)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened >= 0 && flock(opened, LOCK_SH | LOCK_NB) != 0) {
        close(opened);
        return -1;
    }
    return opened;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    TRY(driver_ready());
    if (!out || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct memory_handle *found = known(handle);
    bool allowed = found && found->properties.requestedHandleTypes & type;
    int file = allowed ? open_locked(found->file) : -1;
    if (file >= 0) {
        if (!found->exported)
            found->line = found->charged ? node_keep(found->file, found->card, found->charged) : -1;
        found->exported = true;
        *(int *)out = file;
    }
    pthread_mutex_unlock(&lock);
    if (!allowed)
        return CUDA_ERROR_INVALID_VALUE;
    return file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* The importer may number the devices otherwise than the exporter, or not see the card at all. */
static bool find_device(struct memory_handle *handle, const char *uuid)
{
    for (int ordinal = 0; ordinal < device_count; ordinal++)
        if (strncmp(node_state->cards[device_cards[ordinal]].uuid, uuid, 48) == 0) {
            handle->card = device_cards[ordinal];
            handle->properties.location.id = ordinal;
            return true;
        }
    return false;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shareable,
                                        CUmemAllocationHandleType type)
{
    TRY(driver_ready());
    if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    int given = (int)(intptr_t)shareable;
    struct stat found;
    struct trailer trailer;
    if (fstat(given, &found) != 0 || found.st_size <= TRAILER_BYTES ||
        pread(given, &trailer, sizeof trailer, found.st_size - TRAILER_BYTES) !=
            (ssize_t)sizeof trailer ||
        trailer.magic != TRAILER_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory_handle *handle = object_new(HANDLE, sizeof *handle, NULL);
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    handle->properties = trailer.properties;
    handle->size = (size_t)found.st_size - TRAILER_BYTES;
    handle->own_file = true;
    bool seen = !on_device(&trailer.properties) || find_device(handle, trailer.card_uuid);
    handle->file = seen ? open_locked(given) : -1;
    if (handle->file < 0) {
        object_delete(handle);
        return seen ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_DEVICE;
    }
    handle->references = 1;
    *out = (uintptr_t)handle;
    return CUDA_SUCCESS;
}

/* ---- the addresses ---- */

#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static uintptr_t reserve(size_t size, size_t alignment, uintptr_t wish)
{
    void *base = mmap((void *)wish, size + alignment, PROT_NONE, NOTHING, -1, 0);
    if (base == MAP_FAILED)
        return 0;
    uintptr_t begin = (uintptr_t)base, at = (begin + alignment - 1) / alignment * alignment;
    if (at > begin)
        munmap(base, at - begin);
    munmap((void *)(at + size), begin + alignment - at);
    return at;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags)
{
    TRY(driver_ready());
    if (!pointer || size == 0 || size % GRANULARITY != 0 || (alignment & (alignment - 1)) != 0 ||
        flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    if (size > SIZE_MAX / 4 || alignment > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct reservation *made = malloc(sizeof *made);
    uintptr_t base = made ? reserve(size, alignment, (uintptr_t)wish) : 0;
    if (!base) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    *made = (struct reservation){base, size, 0, reservations};
    reservations = made;
    pthread_mutex_unlock(&lock);
    *pointer = base;
    return CUDA_SUCCESS;
}

/* Under the lock. The place in the list of the reservation that holds all of the range. */
static struct reservation **reservation_of(uintptr_t base, size_t size)
{
    struct reservation **place = &reservations;
    while (*place && (base < (*place)->base || base - (*place)->base > (*place)->size ||
                      size > (*place)->size - (base - (*place)->base)))
        place = &(*place)->next;
    return place;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size)
{
    TRY(driver_ready());
    pthread_mutex_lock(&lock);
    struct reservation **place = reservation_of(pointer, size), *found = *place;
    bool fits = found && found->base == pointer && found->size == size && found->mapped == 0;
    if (fits) {
        *place = found->next;
        munmap((void *)found->base, found->size);
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- the tie ---- */

/* Under the lock. */
static CUresult map(struct memory_handle *handle, uintptr_t base, size_t size)
{
    bool device = on_device(&handle->properties);
    struct allocation held = {.base = base, .size = size, .kind = MEMORY_MAPPED, .card = handle->card,
                              .device = device ? handle->properties.location.id : -1,
                              .handle = handle, .shared = true};
    /* First the entry, which is refused where something is mapped already. */
    if (memory_link(&held) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    handle->mappings++;
    if (mmap((void *)base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->file, handle->offset) !=
        MAP_FAILED)
        return CUDA_SUCCESS;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    TRY(driver_ready());
    if (size == 0 || size % GRANULARITY != 0 || pointer % GRANULARITY != 0 || offset != 0 ||
        flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct memory_handle *found = known(handle);
    struct reservation *around = *reservation_of(pointer, size);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (found && around && size <= found->size) {
        result = map(found, pointer, size);
        if (result != CUDA_ERROR_INVALID_VALUE)
            around->mapped += size;
    }
    pthread_mutex_unlock(&lock);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        memory_drop(pointer, 1u << MEMORY_MAPPED);
    return result;
}

void mapping_give_back(const struct allocation *held)
{
    pthread_mutex_lock(&lock);
    mmap((void *)held->base, held->size, PROT_NONE, NOTHING | MAP_FIXED, -1, 0);
    struct reservation *around = *reservation_of(held->base, held->size);
    if (around)
        around->mapped -= held->size;
    held->handle->mappings--;
    drop_if_unused(held->handle);
    pthread_mutex_unlock(&lock);
}

/* Whether the range is whole mappings, without a gap and without cutting one. */
static bool whole_mappings(uintptr_t base, size_t size)
{
    struct allocation held;
    uintptr_t at = base;
    while (at < base + size) {
        if (!memory_find(at, &held) || held.kind != MEMORY_MAPPED || held.base != at)
            return false;
        at += held.size;
    }
    return size > 0 && at == base + size;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size)
{
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

static CUresult who_is(const CUmemLocation *location, unsigned *who)
{
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

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *wishes,
                        size_t count)
{
    struct allocation held;
    unsigned who;
    TRY(driver_ready());
    if (!wishes || count == 0 || !whole_mappings(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        TRY(who_is(&wishes[i].location, &who));
        if (wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
            wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
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

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                        CUdeviceptr pointer)
{
    struct allocation held;
    unsigned who;
    TRY(driver_ready());
    if (!flags || !location || !memory_find(pointer, &held) || held.kind != MEMORY_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(who_is(location, &who));
    *flags = held.access[who];
    return CUDA_SUCCESS;
}
