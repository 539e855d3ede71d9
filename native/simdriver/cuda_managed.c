/* Hints about memory that host and devices share. Nothing moves: all simulated memory is the host's. Hints are kept by
 * allocation, so a hint for a part holds for all of it. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define NOWHERE (-2) /* as CU_DEVICE_INVALID */

struct hints {
    uint64_t id; /* of the allocation */
    bool read_mostly;
    uint32_t accessed_by; /* bit 0: the host; else by ordinal + 1 */
    CUmemLocation preferred, prefetched;
    struct hints *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hints *all;

void managed_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    all = NULL;
}

static CUresult managed(CUdeviceptr pointer, size_t bytes, struct allocation *held) {
    TRY(driver_ready());
    if (bytes == 0 || !memory_find(pointer, held) || held->kind != MEMORY_MANAGED ||
        bytes > held->size - (pointer - held->base))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* Under the lock; NULL without memory. Hints of allocations that were freed are few and small, and stay. */
static struct hints *hints_of(uint64_t id) {
    struct hints *found = all;
    while (found && found->id != id)
        found = found->next;
    if (found || !(found = calloc(1, sizeof *found)))
        return found;
    found->id = id;
    found->next = all;
    all = found;
    return found;
}

static bool host(const CUmemLocation *location) {
    return location->type >= CU_MEM_LOCATION_TYPE_HOST && location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static CUresult location_known(const CUmemLocation *location) {
    uint32_t card;
    if (host(location))
        return CUDA_SUCCESS;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? device_card(location->id, &card) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUmemLocation location) {
    struct allocation held;
    TRY(managed(pointer, bytes, &held));
    bool placed = advice != CU_MEM_ADVISE_SET_READ_MOSTLY && advice != CU_MEM_ADVISE_UNSET_READ_MOSTLY &&
                  advice != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
    if (placed)
        TRY(location_known(&location));
    pthread_mutex_lock(&lock);
    struct hints *hints = hints_of(held.id);
    CUresult result = hints ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    uint32_t bit = host(&location) ? 1 : 2u << (location.id & (FENKA_NODE_CARDS - 1));
    switch (hints ? (int)advice : 0) {
    case 0:
        break;
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        hints->read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
        break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        hints->preferred = location;
        break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        hints->preferred = (CUmemLocation){0};
        break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
        hints->accessed_by |= bit;
        break;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
        hints->accessed_by &= ~bit;
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUmemLocation of_device(CUdevice device) {
    return device == CU_DEVICE_CPU ? (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST}
                                   : (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
}

CUresult cuMemAdvise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUdevice device) {
    return cuMemAdvise_v2(pointer, bytes, advice, of_device(device));
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags,
                               CUstream stream) {
    CUcontext context;
    struct allocation held;
    TRY(stream_resolve(stream, &context, &stream));
    TRY(managed(pointer, bytes, &held));
    TRY(location_known(&location));
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct hints *hints = hints_of(held.id);
    if (hints)
        hints->prefetched = location;
    pthread_mutex_unlock(&lock);
    return hints ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream) {
    return cuMemPrefetchAsync_v2(pointer, bytes, of_device(device), 0, stream);
}

CUresult cuMemPrefetchBatchAsync(CUdeviceptr *pointers, size_t *sizes, size_t count, CUmemLocation *locations,
                                 size_t *indices, size_t location_count, unsigned long long flags, CUstream stream) {
    if (!pointers || !sizes || !locations || !indices || count == 0 || location_count == 0 || location_count > count ||
        flags != 0 || indices[0] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0, at = 0; i < count; i++) {
        if (at + 1 < location_count && indices[at + 1] == i)
            at++;
        TRY(cuMemPrefetchAsync_v2(pointers[i], sizes[i], locations[at], 0, stream));
    }
    return CUDA_SUCCESS;
}

/* The content need not be kept, and is. */
CUresult cuMemDiscardBatchAsync(CUdeviceptr *pointers, size_t *sizes, size_t count, unsigned long long flags,
                                CUstream stream) {
    CUcontext context;
    struct allocation held;
    TRY(stream_resolve(stream, &context, &stream));
    if (!pointers || !sizes || count == 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        TRY(managed(pointers[i], sizes[i], &held));
    return CUDA_SUCCESS;
}

CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *pointers, size_t *sizes, size_t count, CUmemLocation *locations,
                                           size_t *indices, size_t location_count, unsigned long long flags,
                                           CUstream stream) {
    TRY(cuMemDiscardBatchAsync(pointers, sizes, count, flags, stream));
    return cuMemPrefetchBatchAsync(pointers, sizes, count, locations, indices, location_count, flags, stream);
}

/* ---- what was hinted ---- */

static int ordinal(const CUmemLocation *location) {
    if (host(location))
        return CU_DEVICE_CPU;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : NOWHERE;
}

static int location_id(const CUmemLocation *location) {
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE || location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA
               ? location->id
               : 0;
}

static CUresult accessors(int *out, size_t bytes, uint32_t accessed_by) {
    size_t room = bytes / sizeof *out, count = 0;
    if (bytes == 0 || bytes % sizeof *out != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (int who = 0; who <= FENKA_NODE_CARDS && count < room; who++)
        if (accessed_by >> who & 1)
            out[count++] = who == 0 ? CU_DEVICE_CPU : who - 1;
    while (count < room)
        out[count++] = NOWHERE;
    return CUDA_SUCCESS;
}

static CUresult range_attribute(const struct hints *hints, CUmem_range_attribute attribute, int *out, size_t bytes) {
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY)
        return accessors(out, bytes, hints->accessed_by);
    if (bytes != sizeof *out)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        *out = hints->read_mostly;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        *out = ordinal(&hints->preferred);
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
        *out = ordinal(&hints->prefetched);
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
        *out = (int)hints->preferred.type;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
        *out = location_id(&hints->preferred);
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
        *out = (int)hints->prefetched.type;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
        *out = location_id(&hints->prefetched);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemRangeGetAttribute(void *out, size_t bytes, CUmem_range_attribute attribute, CUdeviceptr pointer,
                                size_t count) {
    struct allocation held;
    TRY(managed(pointer, count, &held));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct hints *hints = hints_of(held.id);
    CUresult result = hints ? range_attribute(hints, attribute, out, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemRangeGetAttributes(void **out, size_t *bytes, CUmem_range_attribute *attributes, size_t number,
                                 CUdeviceptr pointer, size_t count) {
    if (!out || !bytes || !attributes || number == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < number; i++)
        TRY(cuMemRangeGetAttribute(out[i], bytes[i], attributes[i], pointer, count));
    return CUDA_SUCCESS;
}
