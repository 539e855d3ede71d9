/* Stream-ordered allocation. What is freed stays with the pool, and charged, until its stream gets there;
 * afterwards up to the pool's release threshold. What is beyond that is given back when the process next
 * synchronises or asks for memory, and at once where the stream had nothing to do. A pool's memory has no
 * pieces: any of it serves any later request, which then comes behind the free. */
#include <stdlib.h>
#include <string.h>

#include "sim_memory.h"
#include "graph.h"

struct CUmemPoolHandle_st {
    struct object object;
    CUdevice device; /* -1: host memory, which is not charged */
    uint32_t card;
    bool standard;
    bool doomed; /* destroyed, with allocations outstanding */
    uint64_t used, used_high, reserved, reserved_high, limit;
    uint64_t attributes[16];
    uint8_t access[FENKA_NODE_CARDS];
    struct freed *freed; /* that its stream has not reached */
    CUmemoryPool previous, next;
};

struct freed {
    struct timeline_place at;
    uint64_t bytes;
    struct freed *next;
};

static CUmemoryPool first; /* of all pools of cards */
static __thread struct timeline_place freeing; /* generation 0 = at once */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUmemoryPool standard[FENKA_NODE_CARDS], chosen[FENKA_NODE_CARDS], graphs[FENKA_NODE_CARDS];

static CUmemoryPool pool_new(CUdevice device)
{
    CUmemoryPool pool = object_new(POOL, sizeof *pool, NULL);
    if (!pool)
        return NULL;
    pool->device = device;
    pool->card = device >= 0 ? device_cards[device] : 0;
    if (device >= 0) {
        pool->next = first;
        if (first)
            first->previous = pool;
        first = pool;
    }
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = 1;
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC] = 1;
    pool->attributes[CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES] = 1;
    return pool;
}

/* Under the lock. */
static void pool_delete(CUmemoryPool pool)
{
    if (pool->next)
        pool->next->previous = pool->previous;
    if (pool->previous)
        pool->previous->next = pool->next;
    else if (first == pool)
        first = pool->next;
    object_delete(pool);
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

/* Keeps all it ever had, until it is trimmed. */
CUmemoryPool pool_of_graphs(CUdevice device)
{
    pthread_mutex_lock(&lock);
    if (!graphs[device] && (graphs[device] = pool_new(device))) {
        graphs[device]->standard = true;
        graphs[device]->attributes[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] = UINT64_MAX;
    }
    pthread_mutex_unlock(&lock);
    return graphs[device];
}

static CUmemoryPool pool_get(CUmemoryPool handle)
{
    CUmemoryPool pool = object_get(handle, POOL);
    return pool && !pool->doomed ? pool : NULL;
}

/* Under the lock. What is freed on streams that have not got there is in use by the work before. */
static uint64_t in_use(CUmemoryPool pool)
{
    uint64_t bytes = pool->used;
    for (struct freed **place = &pool->freed, *one; (one = *place);) {
        if (timeline_reached(one->at)) {
            *place = one->next;
            free(one);
        } else {
            bytes += one->bytes;
            place = &one->next;
        }
    }
    return bytes;
}

/* Under the lock. */
static void shrink(CUmemoryPool pool, uint64_t keep)
{
    uint64_t used = in_use(pool);
    if (keep < used)
        keep = used;
    if (pool->reserved <= keep)
        return;
    if (pool->device >= 0)
        sim_memory_release(pool->card, pool->reserved - keep);
    pool->reserved = keep;
}

/* Under the lock: what it may keep. True where it was destroyed, and is empty now. */
static bool settle(CUmemoryPool pool)
{
    shrink(pool, pool->doomed ? 0 : pool->attributes[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD]);
    return pool->doomed && pool->reserved == 0;
}

void pools_settle(void)
{
    pthread_mutex_lock(&lock);
    for (CUmemoryPool pool = first, next; pool; pool = next) {
        next = pool->next;
        if (settle(pool))
            pool_delete(pool);
    }
    pthread_mutex_unlock(&lock);
}

bool pool_take(CUmemoryPool pool, uint64_t bytes)
{
    pools_settle();
    pthread_mutex_lock(&lock);
    uint64_t wanted = pool->used + bytes;
    bool granted = !pool->limit || wanted <= pool->limit;
    if (granted && wanted > pool->reserved) {
        granted = pool->device < 0 || sim_memory_charge(pool->card, wanted - pool->reserved);
        pool->reserved = granted ? wanted : pool->reserved;
    }
    if (granted)
        pool->used = wanted;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    pthread_mutex_unlock(&lock);
    return granted;
}

void pool_give_back(CUmemoryPool pool, uint64_t bytes)
{
    struct freed *later = freeing.generation && pool->device >= 0 ? malloc(sizeof *later) : NULL;
    pthread_mutex_lock(&lock);
    pool->used -= bytes;
    if (later) {
        *later = (struct freed){freeing, bytes, pool->freed};
        pool->freed = later;
    }
    if (settle(pool) && pool->used == 0)
        pool_delete(pool);
    pthread_mutex_unlock(&lock);
}

void pools_card_left(uint32_t card)
{
    pthread_mutex_lock(&lock);
    for (CUdevice device = 0; device < device_count; device++)
        if (device_cards[device] == card) {
            if (standard[device])
                shrink(standard[device], 0);
            if (graphs[device])
                shrink(graphs[device], 0);
        }
    pthread_mutex_unlock(&lock);
}

void pools_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(standard, 0, sizeof standard);
    memset(chosen, 0, sizeof chosen);
    memset(graphs, 0, sizeof graphs);
    first = NULL;
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
    if (!pool_get(pool) || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    chosen[device] = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    uint32_t card;
    TRY(driver_ready());
    if (!pool || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED; /* pools are not shared between processes */
    CUmemLocationType where = properties->location.type;
    bool host = where >= CU_MEM_LOCATION_TYPE_HOST && where <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    if (!host && where != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!host)
        TRY(device_card(properties->location.id, &card));
    *pool = pool_new(host ? -1 : properties->location.id);
    if (!*pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*pool)->limit = properties->maxSize;
    return CUDA_SUCCESS;
}

/* With allocations outstanding it ends with the last of them. */
CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    TRY(driver_ready());
    pthread_mutex_lock(&lock);
    bool fits = pool_get(pool) && !pool->standard;
    if (fits) {
        for (CUdevice device = 0; device < device_count; device++)
            if (chosen[device] == pool)
                chosen[device] = NULL;
        pool->doomed = true;
        if (settle(pool))
            pool_delete(pool);
    }
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    TRY(driver_ready());
    if (!pool_get(pool))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    shrink(pool, keep);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* Kept and answered; all simulated memory is the host's, so every device can reach it. */
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *wishes, size_t count)
{
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

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    uint32_t card;
    TRY(driver_ready());
    if (!flags || !pool_get(pool) || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_card(location->id, &card));
    *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                          : (CUmemAccess_flags)pool->access[location->id];
    return CUDA_SUCCESS;
}

static bool is_flag(CUmemPool_attribute attribute)
{
    return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value)
{
    if (is_flag(attribute)) {
        pool->attributes[attribute] = *(const int *)value != 0;
        return CUDA_SUCCESS;
    }
    cuuint64_t number = *(const cuuint64_t *)value;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->attributes[attribute] = number;
        shrink(pool, number);
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
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(driver_ready());
    if (!pool_get(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = set_attribute(pool, attribute, value);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(driver_ready());
    if (!pool_get(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    cuuint64_t number;
    pools_settle();
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number = pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number = pool->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number = pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number = pool->used_high; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number = pool->attributes[attribute]; break;
    default:
        if (!is_flag(attribute))
            return CUDA_ERROR_INVALID_VALUE;
        *(int *)value = (int)pool->attributes[attribute];
        return CUDA_SUCCESS;
    }
    *(cuuint64_t *)value = number;
    return CUDA_SUCCESS;
}

static CUresult captured_allocation(CUdeviceptr *pointer, size_t bytes, CUcontext context,
                                    CUstream stream)
{
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(graph_memory_new(context->device, bytes, &work.taken.memory));
    work.taken.asked.bytesize = bytes;
    work.taken.asked.dptr = *pointer = work.taken.memory->base;
    CUresult result = capture_work(context, stream, &work, &taken);
    if (result != CUDA_SUCCESS)
        graph_memory_hold(work.taken.memory, -1);
    return result;
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
    if (!pool_get(pool))
        return CUDA_ERROR_INVALID_VALUE;
    if (pool->device >= 0 && pool->device != context->device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (stream_capturing(stream))
        return captured_allocation(pointer, bytes, context, stream);
    TRY(memory_new_in_pool(context, bytes, pool, pool->device < 0, &made));
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
    return pool_get(pool) ? allocate(pointer, bytes, pool, stream)
                                  : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .freed = pointer};
    if (stream_capturing(stream) && !graph_memory_known(pointer))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_work(context, stream, &work, &taken));
    if (taken || !pointer)
        return CUDA_SUCCESS;
    /* Memory of the host comes from a pool only when it was allocated like this. */
    struct allocation held;
    bool pooled = memory_find(pointer, &held) && held.pool;
    freeing = timeline_own(context->card, stream_end(context, stream));
    /* What is in no pool is given back to the card, not before the work is done that may use it. */
    if (!pooled)
        timeline_wait(freeing);
    CUresult result = memory_drop(pointer, 1u << MEMORY_DEVICE | 1u << MEMORY_GRAPH |
                                               (pooled ? 1u << MEMORY_HOST : 0));
    freeing.generation = 0;
    return result;
}
