/* Stream-ordered allocation. A pool keeps nothing back: what is freed is free at once. */
#include <string.h>

#include "driver.h"

struct CUmemPoolHandle_st {
    struct object object;
    CUdevice device;
    bool standard;
    int64_t used, high;
    uint64_t attributes[16];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUmemoryPool standard[FENKA_NODE_CARDS], chosen[FENKA_NODE_CARDS];

static CUmemoryPool pool_new(CUdevice device)
{
    CUmemoryPool pool = object_new(POOL, sizeof *pool, NULL);
    if (!pool)
        return NULL;
    pool->device = device;
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = 1;
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC] = 1;
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES] = 1;
    return pool;
}

static CUmemoryPool pool_of(CUmemoryPool *pools, CUdevice device)
{
    pthread_mutex_lock(&lock);
    if (!standard[device] && (standard[device] = pool_new(device)))
        standard[device]->standard = true;
    CUmemoryPool pool = pools[device] ? pools[device] : standard[device];
    pthread_mutex_unlock(&lock);
    return pool;
}

void pool_account(CUmemoryPool pool, int64_t bytes)
{
    int64_t used = __atomic_add_fetch(&pool->used, bytes, __ATOMIC_RELAXED);
    if (used > pool->high)
        pool->high = used;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    uint32_t card;
    TRY(device_card(device, &card));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = pool_of(standard, device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    uint32_t card;
    TRY(device_card(device, &card));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = pool_of(chosen, device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    uint32_t card;
    TRY(device_card(device, &card));
    if (!object_get(pool, POOL) || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    chosen[device] = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    uint32_t card;
    if (!pool || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    TRY(device_card(properties->location.id, &card));
    *pool = pool_new(properties->location.id);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    TRY(driver_ready());
    if (!object_get(pool, POOL) || pool->standard)
        return CUDA_ERROR_INVALID_VALUE;
    if (chosen[pool->device] == pool)
        chosen[pool->device] = NULL;
    /* With allocations outstanding it stays, unseen: they still count down when they are freed. */
    if (__atomic_load_n(&pool->used, __ATOMIC_RELAXED) == 0)
        object_delete(pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    (void)keep; /* nothing is kept back */
    TRY(driver_ready());
    return object_get(pool, POOL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_flag(CUmemPool_attribute attribute)
{
    return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(driver_ready());
    if (!object_get(pool, POOL) || !value || (unsigned)attribute >= 16)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_flag(attribute))
        pool->attributes[attribute] = (uint64_t)*(int *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->attributes[attribute] = *(cuuint64_t *)value;
    else if (*(cuuint64_t *)value == 0) /* the high-water marks may be reset, and only to zero */
        pool->high = pool->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(driver_ready());
    if (!object_get(pool, POOL) || !value || (unsigned)attribute >= 16)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = (cuuint64_t)pool->used; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = (cuuint64_t)pool->high; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->attributes[attribute];
        break;
    default:
        if (!is_flag(attribute))
            return CUDA_ERROR_INVALID_VALUE;
        *(int *)value = (int)pool->attributes[attribute];
    }
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CUcontext context;
    struct allocation made;
    TRY(stream_resolve(stream, &context, &stream));
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool)
        pool = pool_of(chosen, context->device);
    if (!object_get(pool, POOL))
        return CUDA_ERROR_INVALID_VALUE;
    if (pool->device != context->device)
        return CUDA_ERROR_INVALID_DEVICE;
    TRY(memory_new_in_pool(context, bytes, pool, &made));
    *pointer = made.base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return allocate(pointer, bytes, NULL, stream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                 CUstream stream)
{
    return object_get(pool, POOL) ? allocate(pointer, bytes, pool, stream)
                                  : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    return pointer ? memory_drop(pointer, 1u << MEMORY_DEVICE) : CUDA_SUCCESS;
}
