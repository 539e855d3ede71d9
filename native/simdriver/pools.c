/* Pools of memory. What is freed stays with the pool, and charged, until its stream reaches the free; after that
 * up to the pool's release threshold, in whole pages. The rest is returned when the process next synchronises or allocates, and at
 * once if the stream is idle. A pool's memory has no pieces: any of it serves a later request, which then follows
 * the free. */
#include "pools.h"

#include <stdlib.h>
#include <string.h>

#include "sim_memory.h"

struct freed {
    struct timeline_place at;
    uint64_t bytes;
    struct freed *next;
};

static CUmemoryPool first;                     /* of all pools of cards */
static __thread struct timeline_place freeing; /* generation 0 = at once */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUmemoryPool standard[FENKA_NODE_CARDS], chosen[FENKA_NODE_CARDS], graphs[FENKA_NODE_CARDS],
    managed[FENKA_NODE_CARDS], host;

CUmemoryPool pool_new(CUdevice device) {
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
static void pool_delete(CUmemoryPool pool) {
    if (pool->next)
        pool->next->previous = pool->previous;
    if (pool->previous)
        pool->previous->next = pool->next;
    else if (first == pool)
        first = pool->next;
    object_delete(pool);
}

static CUmemoryPool pool_of(CUmemoryPool *pools, CUdevice device) {
    pthread_mutex_lock(&lock);
    if (!standard[device] && (standard[device] = pool_new(device)))
        standard[device]->standard = true;
    CUmemoryPool pool = pools[device] ? pools[device] : standard[device];
    pthread_mutex_unlock(&lock);
    return pool;
}

/* Keeps everything until it is trimmed. */
CUmemoryPool pool_of_graphs(CUdevice device) {
    pthread_mutex_lock(&lock);
    if (!graphs[device] && (graphs[device] = pool_new(device))) {
        graphs[device]->standard = true;
        graphs[device]->attributes[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] = UINT64_MAX;
    }
    pthread_mutex_unlock(&lock);
    return graphs[device];
}

CUmemoryPool pool_managed(CUdevice device) {
    pthread_mutex_lock(&lock);
    if (!managed[device] && (managed[device] = pool_new(device)))
        managed[device]->standard = managed[device]->managed = true;
    pthread_mutex_unlock(&lock);
    return managed[device];
}

CUmemoryPool pool_host(void) {
    pthread_mutex_lock(&lock);
    if (!host && (host = pool_new(-1)))
        host->standard = true;
    pthread_mutex_unlock(&lock);
    return host;
}

CUmemoryPool pool_get(CUmemoryPool handle) {
    CUmemoryPool pool = object_get(handle, POOL);
    return pool && !pool->doomed ? pool : NULL;
}

/* Under the lock. Memory whose free a stream has not reached is in use by the work before it. */
static uint64_t in_use(CUmemoryPool pool) {
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
void pool_shrink(CUmemoryPool pool, uint64_t keep) {
    uint64_t used = in_use(pool);
    keep = rounded_up(keep < used ? used : keep, CARD_PAGE);
    if (pool->reserved <= keep)
        return;
    if (pool->device >= 0)
        sim_memory_release(pool->card, pool->reserved - keep);
    pool->reserved = keep;
}

/* Under the lock: what it may keep. True where it was destroyed, and is empty now. */
static bool settle(CUmemoryPool pool) {
    pool_shrink(pool, pool->doomed ? 0 : pool->attributes[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD]);
    return pool->doomed && pool->reserved == 0;
}

void pools_settle(void) {
    pthread_mutex_lock(&lock);
    for (CUmemoryPool pool = first, next; pool; pool = next) {
        next = pool->next;
        if (settle(pool))
            pool_delete(pool);
    }
    pthread_mutex_unlock(&lock);
}

bool pool_take(CUmemoryPool pool, uint64_t bytes) {
    pools_settle();
    pthread_mutex_lock(&lock);
    uint64_t wanted = pool->used + bytes;
    bool granted = !pool->limit || wanted <= pool->limit;
    if (granted && wanted > pool->reserved) {
        uint64_t pages = rounded_up(wanted, CARD_PAGE);
        granted = pool->device < 0 || sim_memory_charge(pool->card, pages - pool->reserved);
        pool->reserved = granted ? pages : pool->reserved;
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

void pool_give_back(CUmemoryPool pool, uint64_t bytes) {
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

void pools_card_left(uint32_t card) {
    pthread_mutex_lock(&lock);
    for (CUdevice device = 0; device < device_count; device++)
        if (device_cards[device] == card) {
            if (standard[device])
                pool_shrink(standard[device], 0);
            if (graphs[device])
                pool_shrink(graphs[device], 0);
            if (managed[device])
                pool_shrink(managed[device], 0);
        }
    pthread_mutex_unlock(&lock);
}

void pools_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(standard, 0, sizeof standard);
    memset(chosen, 0, sizeof chosen);
    memset(graphs, 0, sizeof graphs);
    memset(managed, 0, sizeof managed);
    host = NULL;
    first = NULL;
}

CUmemoryPool pool_default(CUdevice device) { return pool_of(standard, device); }

CUmemoryPool pool_current(CUdevice device) { return pool_of(chosen, device); }

void pool_set_current(CUdevice device, CUmemoryPool pool) { chosen[device] = pool; }

void pools_lock(void) { pthread_mutex_lock(&lock); }

void pools_unlock(void) { pthread_mutex_unlock(&lock); }

void pool_destroy(CUmemoryPool pool) {
    for (CUdevice device = 0; device < device_count; device++)
        if (chosen[device] == pool)
            chosen[device] = NULL;
    pool->doomed = true;
    if (settle(pool))
        pool_delete(pool);
}

void pool_frees_until(struct timeline_place place) { freeing = place; }
