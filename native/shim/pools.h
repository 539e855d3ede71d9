/* What pools have reserved of a card, which is more than what was allocated from them and not freed: a free on a
 * stream counts when the stream gets there, and a pool gives memory back later still. So pools are charged for what
 * the driver says that they have reserved. */
#ifndef FENKA_POOLS_H
#define FENKA_POOLS_H
#include <stdbool.h>
#include <stdint.h>

#include "resolve.h"

/* Around an allocation of so many bytes: `pools_alloc_begin` charges what the pool must grow by, and nobody else of this
 * process allocates from pools until `pools_alloc_end`, which gives the result that the program shall have. False where the
 * driver does not tell what the pool has reserved: then the allocation is charged by itself. */
bool pools_alloc_begin(unsigned card, CUmemoryPool pool, uint64_t bytes, CUresult *refusal);
CUresult pools_alloc_end(CUresult result, CUdeviceptr pointer, CUstream stream);

CUmemoryPool pools_current(unsigned card); /* that cuMemAllocAsync takes from */

/* Looks at what pools have reserved now, where something was freed lately; true when that was less. `hard`: has them
 * give back what they need not keep. */
bool pools_poll_now(bool hard);
extern bool pools_stale;
static inline bool pools_poll(bool hard) {
    return __builtin_expect(__atomic_load_n(&pools_stale, __ATOMIC_RELAXED), 0) && pools_poll_now(hard);
}
static inline void pools_set_stale(void) {
    __atomic_store_n(&pools_stale, true, __ATOMIC_RELEASE);
}

/* Graphs' memory has a pool of its own on each card, which keeps what was freed. It is charged where it has more
 * than so many bytes, which are charged already to the graphs that there are. */
void pools_graph_memory(unsigned card, int64_t change);

/* A program ends a pool: it ends when it is empty. False where the driver shall do it. */
bool pools_destroy(CUmemoryPool pool, CUresult *result);
void pools_reset(void); /* in a child after fork */
#endif
