/* Charges memory pools with what they have reserved on the card. That is more than what is allocated from them: a free
 * on a stream takes effect when the stream reaches it, and a pool returns memory later still. */
#ifndef FENKA_POOLS_H
#define FENKA_POOLS_H
#include <stdbool.h>
#include <stdint.h>

#include "resolve.h"

/* Around an allocation from a pool. pools_alloc_begin charges what the pool must grow by; until pools_alloc_end no
 * other thread allocates from pools. pools_alloc_end returns the result for the program. False if the driver does not
 * report the pool's reserved memory; then the allocation is charged by itself. */
bool pools_alloc_begin(unsigned card, CUmemoryPool pool, uint64_t bytes, CUresult *refusal);
CUresult pools_alloc_end(CUresult result, CUdeviceptr pointer, CUstream stream);

CUmemoryPool pools_current(unsigned card); /* from which cuMemAllocAsync allocates */

/* Reads what pools have reserved, if anything was freed since. True if that was less than charged. `trim`: makes pools
 * return what they do not need. */
bool pools_poll_now(bool trim);
extern bool pools_stale;
static inline bool pools_poll(bool trim) {
    return __builtin_expect(__atomic_load_n(&pools_stale, __ATOMIC_RELAXED), 0) && pools_poll_now(trim);
}
static inline void pools_set_stale(void) { __atomic_store_n(&pools_stale, true, __ATOMIC_RELEASE); }

/* Memory nodes. Graphs' memory has its own pool on each card, which takes whole pages, and keeps freed memory. Its pages
 * are charged when a node is added, which is refused if they do not fit; what it has in addition is charged after a
 * launch, and when nodes are released. */
CUresult pools_graph_add(unsigned card, uint64_t bytes);
void pools_graph_remove(unsigned card, uint64_t bytes);
void pools_graph_launched(void);

/* Destroys a pool once it is empty. False if the driver's function is to be called instead. */
bool pools_destroy(CUmemoryPool pool, CUresult *result);

void pools_reset(void); /* in a child after fork */
#endif
