#include "pools.h"

#include <string.h>

#include "account.h"
#include "account_page.h"
#include "card_bytes.h"
#include "deferred_release.h"
#include "fenka/lease.h"
#include "lease.h"
#include "os.h"

#define FIRST_POOLS 256

struct pool {
    CUmemoryPool pool;
    uint64_t charged;
    uint8_t card;
    bool destroyed; /* by the program */
};

bool pools_stale;
static struct os_lock lock;
static struct pool *pools;
static size_t count, room;
static struct {
    uint64_t nodes;   /* bytes of memory nodes */
    uint64_t pages;   /* that these take, which are charged */
    uint64_t charged; /* beyond the pages */
} graphs[FENKA_MAX_CARDS];
static struct pool *allocating;

void pools_reset(void) {
    lock.held = 0;
    count = 0;
    pools_stale = false;
    memset(graphs, 0, sizeof graphs);
}

/* ---- with the lock held ---- */

static bool query_reserved(CUmemoryPool pool, uint64_t *bytes) {
    return HAS(cuMemPoolGetAttribute) &&
           REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, bytes) == CUDA_SUCCESS;
}

static uint64_t query_used(CUmemoryPool pool) {
    uint64_t bytes = 0;
    REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes);
    return bytes;
}

/* Charges exactly what is reserved, even beyond the cap: the memory exists. True if that was less than before. */
static bool charge_exactly(unsigned card, uint64_t *charged, uint64_t reserved_bytes) {
    bool returned = reserved_bytes < *charged;
    if (returned)
        account_discharge(card, *charged - reserved_bytes);
    else if (reserved_bytes > *charged)
        account_force_charge(card, reserved_bytes - *charged);
    *charged = reserved_bytes;
    return returned;
}

static bool poll_graphs(unsigned card, bool trim) {
    uint64_t bytes = 0;
    CUdevice device = device_of_card(card);
    if (!HAS(cuDeviceGetGraphMemAttribute) || device < 0)
        return false;
    if (trim)
        REAL(cuDeviceGraphMemTrim)(device);
    if (REAL(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS)
        bytes = 0;
    return charge_exactly(card, &graphs[card].charged, bytes > graphs[card].pages ? bytes - graphs[card].pages : 0);
}

/* A pool that the driver no longer reports has died with its context. */
static bool poll_pool(struct pool *entry, bool trim, bool *pending) {
    uint64_t reserved_bytes = 0;
    if (trim || entry->destroyed)
        REAL(cuMemPoolTrimTo)(entry->pool, 0);
    if (!query_reserved(entry->pool, &reserved_bytes))
        reserved_bytes = 0;
    *pending |= reserved_bytes > query_used(entry->pool);
    return charge_exactly(entry->card, &entry->charged, reserved_bytes);
}

static bool poll_all(bool trim) {
    bool returned = false, pending = false;
    for (size_t i = 0; i < count;) {
        returned |= poll_pool(&pools[i], trim, &pending);
        if (pools[i].destroyed && !pools[i].charged) {
            REAL(cuMemPoolDestroy)(pools[i].pool);
            pools[i] = pools[--count];
        } else {
            pending |= pools[i++].destroyed;
        }
    }
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++)
        if (graphs[card].charged) {
            returned |= poll_graphs(card, true);
            pending |= graphs[card].charged != 0;
        }
    if (pending)
        pools_set_stale();
    return returned;
}

/* A pool without an entry could not be charged for its pages. NULL without host memory. */
static struct pool *find_or_add(unsigned card, CUmemoryPool pool) {
    for (size_t i = 0; i < count; i++)
        if (pools[i].pool == pool)
            return &pools[i];
    struct pool *larger = count < room ? pools : os_grow(pools, sizeof *pools, &room, FIRST_POOLS);
    if (!larger)
        return NULL;
    pools = larger;
    pools[count] = (struct pool){.pool = pool, .card = (uint8_t)card};
    return &pools[count++];
}

/* ---- */

CUmemoryPool pools_current(unsigned card) {
    CUmemoryPool pool = NULL;
    CUdevice device = device_of_card(card);
    return device >= 0 && REAL(cuDeviceGetMemPool)(&pool, device) == CUDA_SUCCESS ? pool : NULL;
}

bool pools_poll_now(bool trim) {
    os_lock(&lock);
    __atomic_store_n(&pools_stale, false, __ATOMIC_RELEASE);
    bool returned = poll_all(trim);
    os_unlock(&lock);
    return returned;
}

static bool charge_growth(unsigned card, uint64_t bytes) {
    return account_charge(card, bytes) || (deferred_poll() && account_charge(card, bytes));
}

bool pools_alloc_begin(unsigned card, CUmemoryPool pool, uint64_t bytes, CUresult *refusal) {
    uint64_t reserved_bytes;
    os_lock(&lock);
    struct pool *entry = NULL;
    if (!query_reserved(pool, &reserved_bytes)) {
        os_unlock(&lock);
        return false;
    }
    *refusal = CUDA_ERROR_OUT_OF_MEMORY;
    /* Polling moves entries. */
    for (int attempt = 0; attempt < 2 && *refusal && (entry = find_or_add(card, pool)); attempt++) {
        uint64_t wanted, growth;
        charge_exactly(card, &entry->charged, reserved_bytes);
        if (__builtin_add_overflow(query_used(pool), bytes, &wanted))
            break;
        growth = wanted > reserved_bytes ? rounded_up(wanted, CARD_PAGE) - reserved_bytes : 0;
        if (!growth || charge_growth(card, growth)) {
            entry->charged += growth;
            *refusal = CUDA_SUCCESS;
        } else {
            poll_all(true); /* trims this pool and the others */
            query_reserved(pool, &reserved_bytes);
        }
    }
    allocating = entry;
    if (*refusal) {
        account_count_refusal(card);
        os_unlock(&lock);
    }
    return true;
}

/* The driver reserves whole pages, which may be more than was charged. If that does not fit, the memory is freed. */
CUresult pools_alloc_end(CUresult result, CUdeviceptr pointer, CUstream stream) {
    struct pool *entry = allocating;
    uint64_t reserved_bytes = entry->charged;
    query_reserved(entry->pool, &reserved_bytes);
    if (result == CUDA_SUCCESS && reserved_bytes > entry->charged) {
        if (charge_growth(entry->card, reserved_bytes - entry->charged)) {
            entry->charged = reserved_bytes;
        } else {
            REAL(cuMemFreeAsync)(pointer, stream);
            account_count_refusal(entry->card);
            result = CUDA_ERROR_OUT_OF_MEMORY;
            pools_set_stale();
        }
    }
    charge_exactly(entry->card, &entry->charged, reserved_bytes);
    os_unlock(&lock);
    return result;
}

CUresult pools_graph_add(unsigned card, uint64_t bytes) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    os_lock(&lock);
    for (int attempt = 0; attempt < 2 && result; attempt++) {
        uint64_t nodes = graphs[card].nodes, pages;
        if (__builtin_add_overflow(nodes, bytes, &nodes))
            break;
        pages = rounded_up(nodes, CARD_PAGE);
        if (pages == graphs[card].pages || charge_growth(card, pages - graphs[card].pages)) {
            graphs[card].nodes = nodes;
            graphs[card].pages = pages;
            result = CUDA_SUCCESS;
        } else {
            poll_all(true);
        }
    }
    if (result)
        account_count_refusal(card);
    os_unlock(&lock);
    return result;
}

void pools_graph_remove(unsigned card, uint64_t bytes) {
    os_lock(&lock);
    graphs[card].nodes -= bytes;
    uint64_t pages = rounded_up(graphs[card].nodes, CARD_PAGE);
    account_discharge(card, graphs[card].pages - pages);
    graphs[card].pages = pages;
    if (poll_graphs(card, true) | (graphs[card].charged != 0))
        pools_set_stale();
    os_unlock(&lock);
}

void pools_graph_launched(void) {
    os_lock(&lock);
    for (unsigned card = 0; card < FENKA_MAX_CARDS; card++) {
        if (graphs[card].pages)
            poll_graphs(card, false);
        if (graphs[card].charged)
            pools_set_stale();
    }
    os_unlock(&lock);
}

static bool is_default(CUmemoryPool pool, CUdevice device) {
    CUmemoryPool default_pool = NULL;
    return REAL(cuDeviceGetDefaultMemPool)(&default_pool, device) == CUDA_SUCCESS && default_pool == pool;
}

/* As the driver does it: a device whose current pool is destroyed gets its default pool back. */
static void restore_default(CUmemoryPool pool, CUdevice device) {
    CUmemoryPool other = NULL;
    if (REAL(cuDeviceGetMemPool)(&other, device) == CUDA_SUCCESS && other == pool &&
        REAL(cuDeviceGetDefaultMemPool)(&other, device) == CUDA_SUCCESS)
        REAL(cuDeviceSetMemPool)(device, other);
}

bool pools_destroy(CUmemoryPool pool, CUresult *result) {
    bool known = false;
    os_lock(&lock);
    for (size_t i = 0; i < count && !known; i++) {
        CUdevice device = device_of_card(pools[i].card);
        if (pools[i].pool != pool || is_default(pool, device))
            continue;
        known = true;
        *result = pools[i].destroyed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        pools[i].destroyed = true;
        restore_default(pool, device);
    }
    os_unlock(&lock);
    if (known) {
        pools_set_stale();
        pools_poll(false);
    }
    return known;
}
