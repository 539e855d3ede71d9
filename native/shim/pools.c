#include "pools.h"

#include <string.h>

#include "account.h"
#include "fenka/lease.h"
#include "deferred_release.h"
#include "lease.h"
#include "os.h"

#define MOST 256

struct pool {
    CUmemoryPool pool;
    uint64_t charged;
    uint8_t card;
    bool destroyed; /* by the program */
};

bool pools_stale;
static struct os_lock looking;
static struct pool pools[MOST];
static unsigned count;
static struct {
    uint64_t nodes, charged;
} graphs[FENKA_MAX_CARDS];
static struct pool *growing;

void pools_reset(void) {
    looking.held = 0;
    count = 0;
    pools_stale = false;
    memset(graphs, 0, sizeof graphs);
}

/* ---- under the lock ---- */

static bool reserved(CUmemoryPool pool, uint64_t *bytes) {
    return HAS(cuMemPoolGetAttribute) &&
           REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, bytes) == CUDA_SUCCESS;
}

static uint64_t used(CUmemoryPool pool) {
    uint64_t bytes = 0;
    REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes);
    return bytes;
}

/* What is on the card is charged, whether it fits or not: it fits when it is allocated. */
static bool charge_exactly(unsigned card, uint64_t *charged, uint64_t there) {
    bool less = there < *charged;
    if (less)
        account_discharge(card, *charged - there);
    else if (there > *charged)
        account_force_charge(card, there - *charged);
    *charged = there;
    return less;
}

static CUdevice device_of(unsigned card) {
    int devices = 0;
    REAL(cuDeviceGetCount)(&devices);
    for (CUdevice device = 0; device < devices; device++)
        if (card_of_device(device) == (int)card)
            return device;
    return -1;
}

static bool look_at_graphs(unsigned card) {
    uint64_t there = 0;
    CUdevice device = device_of(card);
    if (!HAS(cuDeviceGetGraphMemAttribute) || device < 0)
        return false;
    REAL(cuDeviceGraphMemTrim)(device);
    if (REAL(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &there) != CUDA_SUCCESS)
        there = 0;
    return charge_exactly(card, &graphs[card].charged, there > graphs[card].nodes ? there - graphs[card].nodes : 0);
}

/* Who keeps nothing in it may lose a pool that a context took with it. */
static bool look_at(struct pool *one, bool hard, bool *waits) {
    uint64_t there = 0;
    if (hard || one->destroyed)
        REAL(cuMemPoolTrimTo)(one->pool, 0);
    if (!reserved(one->pool, &there))
        there = 0;
    *waits |= there > used(one->pool);
    return charge_exactly(one->card, &one->charged, there);
}

static bool look(bool hard) {
    bool less = false, waits = false;
    for (unsigned i = 0; i < count;) {
        less |= look_at(&pools[i], hard, &waits);
        if (pools[i].destroyed && !pools[i].charged) {
            REAL(cuMemPoolDestroy)(pools[i].pool);
            pools[i] = pools[--count];
        } else {
            waits |= pools[i++].destroyed;
        }
    }
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        if (graphs[card].charged) {
            less |= look_at_graphs(card);
            waits |= graphs[card].charged != 0;
        }
    if (waits)
        pools_set_stale();
    return less;
}

static struct pool *known(unsigned card, CUmemoryPool pool) {
    for (unsigned i = 0; i < count; i++)
        if (pools[i].pool == pool)
            return &pools[i];
    if (count == MOST)
        return NULL;
    pools[count] = (struct pool){.pool = pool, .card = (uint8_t)card};
    return &pools[count++];
}

/* ---- */

CUmemoryPool pools_current(unsigned card) {
    CUmemoryPool pool = NULL;
    CUdevice device = device_of(card);
    return device >= 0 && REAL(cuDeviceGetMemPool)(&pool, device) == CUDA_SUCCESS ? pool : NULL;
}

bool pools_poll_now(bool hard) {
    os_lock(&looking);
    __atomic_store_n(&pools_stale, false, __ATOMIC_RELEASE);
    bool less = look(hard);
    os_unlock(&looking);
    return less;
}

static bool granted(unsigned card, uint64_t bytes) {
    return account_charge(card, bytes) || (deferred_poll() && account_charge(card, bytes));
}

bool pools_alloc_begin(unsigned card, CUmemoryPool pool, uint64_t bytes, CUresult *refusal) {
    uint64_t there;
    os_lock(&looking);
    struct pool *one = reserved(pool, &there) ? known(card, pool) : NULL;
    if (!one) {
        os_unlock(&looking);
        return false;
    }
    *refusal = CUDA_ERROR_OUT_OF_MEMORY;
    for (int attempt = 0; attempt < 2 && *refusal; attempt++) {
        uint64_t busy = used(pool), wanted;
        charge_exactly(card, &one->charged, there);
        wanted = bytes > there || busy > there - bytes ? busy + bytes - there : 0;
        if (__builtin_add_overflow(busy, bytes, &busy))
            break;
        if (!wanted || granted(card, wanted)) {
            one->charged += wanted;
            *refusal = CUDA_SUCCESS;
        } else {
            look(true); /* what other pools, and this one, need not keep */
            reserved(pool, &there);
        }
    }
    growing = one;
    if (*refusal)
        os_unlock(&looking);
    return true;
}

/* The driver may have taken more than it said, in whole pages; what does not fit then goes back. */
CUresult pools_alloc_end(CUresult result, CUdeviceptr pointer, CUstream stream) {
    struct pool *one = growing;
    uint64_t there = one->charged;
    reserved(one->pool, &there);
    if (result == CUDA_SUCCESS && there > one->charged) {
        if (granted(one->card, there - one->charged)) {
            one->charged = there;
        } else {
            REAL(cuMemFreeAsync)(pointer, stream);
            result = CUDA_ERROR_OUT_OF_MEMORY;
            pools_set_stale();
        }
    }
    charge_exactly(one->card, &one->charged, there);
    os_unlock(&looking);
    return result;
}

void pools_graph_memory(unsigned card, int64_t change) {
    os_lock(&looking);
    graphs[card].nodes += (uint64_t)change;
    if (change < 0 && look_at_graphs(card) | (graphs[card].charged != 0))
        pools_set_stale();
    os_unlock(&looking);
}

static bool is_usual(CUmemoryPool pool, CUdevice device) {
    CUmemoryPool usual = NULL;
    return REAL(cuDeviceGetDefaultMemPool)(&usual, device) == CUDA_SUCCESS && usual == pool;
}

/* As the driver says: a device whose pool it was has its default one again. */
static void unset(CUmemoryPool pool, CUdevice device) {
    CUmemoryPool other = NULL;
    if (REAL(cuDeviceGetMemPool)(&other, device) == CUDA_SUCCESS && other == pool &&
        REAL(cuDeviceGetDefaultMemPool)(&other, device) == CUDA_SUCCESS)
        REAL(cuDeviceSetMemPool)(device, other);
}

bool pools_destroy(CUmemoryPool pool, CUresult *result) {
    bool ours = false;
    os_lock(&looking);
    for (unsigned i = 0; i < count && !ours; i++) {
        CUdevice device = device_of(pools[i].card);
        if (pools[i].pool != pool || is_usual(pool, device))
            continue;
        ours = true;
        *result = pools[i].destroyed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        pools[i].destroyed = true;
        unset(pool, device);
    }
    os_unlock(&looking);
    if (ours) {
        pools_set_stale();
        pools_poll(false);
    }
    return ours;
}
