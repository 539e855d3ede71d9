/* Pools of memory, for the files that implement them. */
#ifndef FENKA_SIMULATED_POOLS_H
#define FENKA_SIMULATED_POOLS_H
#include "driver.h"

struct CUmemPoolHandle_st {
    struct object object;
    CUdevice device; /* -1: host memory, which is not charged */
    uint32_t card;
    bool standard;
    bool managed;
    bool doomed; /* destroyed, with allocations outstanding */
    uint64_t used, used_high, reserved, reserved_high, limit;
    uint64_t attributes[16];
    uint8_t access[FENKA_NODE_CARDS];
    struct freed *freed; /* that its stream has not reached */
    CUmemoryPool previous, next;
};

/* `device`: -1 = of host memory. */
CUmemoryPool pool_new(CUdevice device);
/* NULL for a handle that is no pool, or a destroyed one. */
CUmemoryPool pool_get(CUmemoryPool handle);
CUmemoryPool pool_default(CUdevice device);
CUmemoryPool pool_current(CUdevice device);
/* The process's pool of managed memory that is charged to the device; and of the host's. */
CUmemoryPool pool_managed(CUdevice device);
CUmemoryPool pool_host(void);
void pool_set_current(CUdevice device, CUmemoryPool pool);

void pools_lock(void);
void pools_unlock(void);
/* Under the lock. A pool with allocations ends with the last of them. */
void pool_destroy(CUmemoryPool pool);
void pool_shrink(CUmemoryPool pool, uint64_t keep);

/* What this thread frees from now on stays in use until then; generation 0 = until now. */
void pool_frees_until(struct timeline_place place);
#endif
