/* Physical memory (cuMemCreate), and its exchange between processes.
 *
 * Memory without a shareable type lies in the arena; memory that can be shared has a file of its own. An importer of
 * such a file holds a lock on it, which the kernel drops with the last descriptor and the last mapping. So the creator
 * notices that, and discharges the memory only then; if the creator ends first, the card server does. */
#define _GNU_SOURCE
#include "vmm.h"

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

#define TRAILER_BYTES 4096
#define TRAILER_MAGIC 0x4d4d56616b6e6566 /* "fenkaVMM" */
#define WAITER_STACK (64u << 10)

/* Follows the memory in a file that can be shared. */
struct trailer {
    uint64_t magic;
    CUmemAllocationProp properties;
    char card_uuid[48];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void vmm_lock(void) { pthread_mutex_lock(&lock); }

void vmm_unlock(void) { pthread_mutex_unlock(&lock); }

void vmm_handles_after_fork(void) { lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static CUresult check_properties(const CUmemAllocationProp *properties, uint32_t *card) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    *card = 0;
    switch ((int)properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return device_card(properties->location.id, card);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return driver_ready();
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static bool back_with_own_file(struct memory_handle *handle) {
    struct trailer trailer = {.magic = TRAILER_MAGIC, .properties = handle->properties};
    if (on_device(&handle->properties))
        snprintf(trailer.card_uuid, sizeof trailer.card_uuid, "%s", node_state->cards[handle->card].uuid);
    handle->own_file = true;
    handle->file = memory_file("fenka-memory");
    if (handle->file < 0)
        return false;
    if (ftruncate(handle->file, (off_t)handle->size + TRAILER_BYTES) == 0 &&
        pwrite(handle->file, &trailer, sizeof trailer, (off_t)handle->size) == (ssize_t)sizeof trailer)
        return true;
    close(handle->file);
    return false;
}

static bool back_with_arena(struct memory_handle *handle) {
    handle->file = arena_reserve(handle->size, handle->card, &handle->offset);
    return handle->file >= 0;
}

/* Ends the card server's keeping of the file: this process has seen the memory freed. */
static void unkeep(const struct memory_handle *handle) {
    if (handle->exported && handle->line >= 0)
        close(handle->line);
}

static void *wait_for_importers(void *argument) {
    struct memory_handle *handle = argument;
    while (flock(handle->file, LOCK_EX) != 0 && errno == EINTR)
        ;
    close(handle->file);
    sim_memory_release(handle->card, handle->charged);
    unkeep(handle);
    object_delete(handle);
    return NULL;
}

static bool leave_to_importers(struct memory_handle *handle) {
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

/* Under the lock, after a reference or a mapping was removed. */
void vmm_drop_if_unused(struct memory_handle *handle) {
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

/* Under the lock. A handle that was released is invalid, even if its memory is still mapped. */
struct memory_handle *vmm_handle(CUmemGenericAllocationHandle handle) {
    struct memory_handle *found = object_get((void *)(uintptr_t)handle, HANDLE);
    return found && found->references > 0 ? found : NULL;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
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
    vmm_lock();
    bool backed = properties->requestedHandleTypes ? back_with_own_file(handle) : back_with_arena(handle);
    handle->references = backed;
    vmm_unlock();
    if (!backed) {
        sim_memory_release(card, handle->charged);
        object_delete(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    TRY(driver_ready());
    vmm_lock();
    struct memory_handle *found = vmm_handle(handle);
    if (found) {
        found->references--;
        vmm_drop_if_unused(found);
    }
    vmm_unlock();
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    struct allocation held;
    TRY(driver_ready());
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    vmm_lock();
    bool mapped = memory_find((uintptr_t)address, &held) && held.kind == MEMORY_MAPPED;
    if (mapped) {
        held.handle->references++;
        *handle = (uintptr_t)held.handle;
    }
    vmm_unlock();
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags which) {
    uint32_t card;
    TRY(check_properties(properties, &card));
    if (!granularity || (which != CU_MEM_ALLOC_GRANULARITY_MINIMUM && which != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    TRY(driver_ready());
    vmm_lock();
    struct memory_handle *found = properties ? vmm_handle(handle) : NULL;
    if (found)
        *properties = found->properties;
    vmm_unlock();
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Opens the file again, because a lock belongs to the open file and not to the descriptor. */
static int open_locked(int file) {
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened >= 0 && flock(opened, LOCK_SH | LOCK_NB) != 0) {
        close(opened);
        return -1;
    }
    return opened;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    TRY(driver_ready());
    if (!out || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    vmm_lock();
    struct memory_handle *found = vmm_handle(handle);
    bool allowed = found && found->properties.requestedHandleTypes & type;
    int file = allowed ? open_locked(found->file) : -1;
    if (file >= 0) {
        if (!found->exported)
            found->line = found->charged ? node_keep(found->file, found->card, found->charged) : -1;
        found->exported = true;
        *(int *)out = file;
    }
    vmm_unlock();
    if (!allowed)
        return CUDA_ERROR_INVALID_VALUE;
    return file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* The importer may number devices differently, or not see the card at all. */
static bool find_device(struct memory_handle *handle, const char *uuid) {
    for (int ordinal = 0; ordinal < device_count; ordinal++)
        if (strncmp(node_state->cards[device_cards[ordinal]].uuid, uuid, 48) == 0) {
            handle->card = device_cards[ordinal];
            handle->properties.location.id = ordinal;
            return true;
        }
    return false;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shareable,
                                        CUmemAllocationHandleType type) {
    TRY(driver_ready());
    if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    int given = (int)(intptr_t)shareable;
    struct stat found;
    struct trailer trailer;
    if (fstat(given, &found) != 0 || found.st_size <= TRAILER_BYTES ||
        pread(given, &trailer, sizeof trailer, found.st_size - TRAILER_BYTES) != (ssize_t)sizeof trailer ||
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
