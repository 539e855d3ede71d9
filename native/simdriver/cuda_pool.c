/* Stream-ordered allocation, and the calls on pools. */

#include "graph.h"
#include "pools.h"

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = pool_default(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = pool_current(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!pool_get(pool) || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    pool_set_current(device, pool);
    return CUDA_SUCCESS;
}

/* ---- pools by the place of their memory ---- */

static bool of_host(const CUmemLocation *location) {
    return location->type >= CU_MEM_LOCATION_TYPE_HOST && location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static CUresult standard_pool(CUmemoryPool *pool, const CUmemLocation *location, CUmemAllocationType type,
                              bool current) {
    uint32_t card;
    CUdevice device;
    TRY(driver_ready());
    if (!pool || !location || (type != CU_MEM_ALLOCATION_TYPE_PINNED && type != CU_MEM_ALLOCATION_TYPE_MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED, host = of_host(location);
    if (managed && (host || location->type == CU_MEM_LOCATION_TYPE_NONE))
        TRY(cuCtxGetDevice(&device));
    else if (host)
        device = -1;
    else if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        device = location->id;
    else
        return CUDA_ERROR_INVALID_VALUE;
    if (device >= 0)
        TRY(device_card(device, &card));
    *pool = managed      ? pool_managed(device)
            : device < 0 ? pool_host()
            : current    ? pool_current(device)
                         : pool_default(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return standard_pool(pool, location, type, false);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return standard_pool(pool, location, type, true);
}

/* Only pools of a card can be exchanged here. */
CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    TRY(driver_ready());
    if (!location || !pool_get(pool))
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_ALLOCATION_TYPE_PINNED || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    return cuDeviceSetMemPool(location->id, pool);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    uint32_t card;
    TRY(driver_ready());
    if (!pool || !properties ||
        (properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED; /* pools are not shared between processes */
    bool managed = properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    CUmemLocationType where = properties->location.type;
    bool host = of_host(&properties->location);
    CUdevice device = properties->location.id;
    /* Managed memory without a place lies where it is used first: here the current card is charged. */
    if (managed && (host || where == CU_MEM_LOCATION_TYPE_NONE))
        TRY(cuCtxGetDevice(&device));
    else if (!host && where != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (managed || !host)
        TRY(device_card(device, &card));
    *pool = pool_new(host && !managed ? -1 : device);
    if (!*pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*pool)->limit = properties->maxSize;
    (*pool)->managed = managed;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    TRY(driver_ready());
    pools_lock();
    bool fits = pool_get(pool) && !pool->standard;
    if (fits)
        pool_destroy(pool);
    pools_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    TRY(driver_ready());
    if (!pool_get(pool))
        return CUDA_ERROR_INVALID_VALUE;
    pools_lock();
    pool_shrink(pool, keep);
    pools_unlock();
    return CUDA_SUCCESS;
}

/* Only stored: all simulated memory is the host's, so every device can access it. */
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *wishes, size_t count) {
    uint32_t card;
    TRY(driver_ready());
    if (!pool_get(pool) || !wishes)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (wishes[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return CUDA_ERROR_INVALID_VALUE;
        TRY(device_card(wishes[i].location.id, &card));
        bool own = wishes[i].location.id == pool->device;
        if (wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
            (own || wishes[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE))
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++)
        pool->access[wishes[i].location.id] = (uint8_t)wishes[i].flags;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location) {
    uint32_t card;
    TRY(driver_ready());
    if (!flags || !pool_get(pool) || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_card(location->id, &card));
    *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                          : (CUmemAccess_flags)pool->access[location->id];
    return CUDA_SUCCESS;
}

static bool is_flag(CUmemPool_attribute attribute) {
    return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value) {
    if (is_flag(attribute)) {
        pool->attributes[attribute] = *(const int *)value != 0;
        return CUDA_SUCCESS;
    }
    cuuint64_t number = *(const cuuint64_t *)value;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->attributes[attribute] = number;
        pool_shrink(pool, number);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (number != 0) /* the high-water marks may be reset, and only to zero */
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            pool->used_high = pool->used;
        else
            pool->reserved_high = pool->reserved;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    TRY(driver_ready());
    if (!pool_get(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    pools_lock();
    CUresult result = set_attribute(pool, attribute, value);
    pools_unlock();
    return result;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    TRY(driver_ready());
    if (!pool_get(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    cuuint64_t number;
    pools_settle();
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        number = pool->reserved;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        number = pool->reserved_high;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        number = pool->used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        number = pool->used_high;
        break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        number = pool->attributes[attribute];
        break;
    default:
        if (!is_flag(attribute))
            return CUDA_ERROR_INVALID_VALUE;
        *(int *)value = (int)pool->attributes[attribute];
        return CUDA_SUCCESS;
    }
    *(cuuint64_t *)value = number;
    return CUDA_SUCCESS;
}

static CUresult captured_allocation(CUdeviceptr *pointer, size_t bytes, CUcontext context, CUstream stream) {
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    TRY(graph_memory_new(context->device, bytes, &work.taken.memory));
    work.taken.asked.bytesize = bytes;
    work.taken.asked.dptr = *pointer = work.taken.memory->base;
    CUresult result = capture_work(context, stream, &work, &taken);
    if (result != CUDA_SUCCESS)
        graph_memory_hold(work.taken.memory, -1);
    return result;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    CUcontext context;
    struct allocation made;
    TRY(stream_resolve(stream, &context, &stream));
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool)
        pool = pool_current(context->device);
    if (!pool_get(pool))
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = 0;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (stream_capturing(stream))
        return captured_allocation(pointer, bytes, context, stream);
    enum memory_kind kind = pool->managed ? MEMORY_MANAGED : pool->device < 0 ? MEMORY_HOST : MEMORY_DEVICE;
    TRY(memory_new_in_pool(context, bytes, pool, kind, &made));
    *pointer = made.base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    return allocate(pointer, bytes, NULL, stream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return pool_get(pool) ? allocate(pointer, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .freed = pointer};
    if (!pointer)
        return CUDA_SUCCESS;
    if (stream_capturing(stream) && !graph_memory_known(pointer))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_work(context, stream, &work, &taken));
    if (taken)
        return CUDA_SUCCESS;
    /* Host memory comes from a pool only if it was allocated by these calls. */
    struct allocation held;
    bool pooled = memory_find(pointer, &held) && held.pool;
    struct timeline_place end = timeline_own(context->card, stream_end(context, stream));
    pool_frees_until(end);
    /* Memory without pool is freed now, so the work that may use it must be done. */
    if (!pooled)
        timeline_wait(end);
    CUresult result = memory_drop(pointer, 1u << MEMORY_DEVICE | 1u << MEMORY_GRAPH | (pooled ? 1u << MEMORY_HOST : 0));
    pool_frees_until((struct timeline_place){0});
    return result;
}
