/* What this process has allocated: driver object -> bytes charged for it.
 *
 * Sharded, because threads allocate at the same time. */
#ifndef FENKA_ALLOCATIONS_H
#define FENKA_ALLOCATIONS_H
#include <stdbool.h>
#include <stdint.h>

/* Objects of different kinds may have equal handles. */
enum kind {
    NOTHING,
    POINTER,
    ARRAY,
    MIPMAP,
    HEAP,
    MODULE,
    IPC_IMPORT,
    NODE, /* memory that may have an owner */
    BLOCK,
    MAPPING,
    DEFERRED,
    POOL,
    CONTEXT,
    GRAPH,
    EXEC,
    LIBRARY
};

#define NO_CARD 255 /* an object that takes no card's memory, such as a host pool */

struct allocation {
    uint64_t key;
    uint64_t bytes;      /* GRAPH: number of launches */
    uint64_t owner;      /* 0 = none. Memory: the context that it dies with; NODE, EXEC: the graph; MAPPING: its BLOCK;
                     * exported BLOCK: the first byte of its export lock */
    uint32_t references; /* NODE: 1 + the graph's launches when this was last freed */
    uint8_t kind, card;
    uint8_t shared; /* BLOCK, POINTER: one of the following */
};

/* A POOLED pointer is charged to its pool. A FROM_GRAPH pointer was allocated by a graph that no longer exists. */
enum { OWN, EXPORTED, IMPORTED, POOLED, FROM_GRAPH };

#define NO_EXPORT_LOCK 1 /* the owner of an exported BLOCK whose descriptor does not support locks */

/* Adds an allocation. An existing one of the same key and kind is replaced and returned in `old`: the driver has
 * reused a key whose free the shim did not see. False without host memory; then the charge stays, which is the safe
 * side. */
bool allocations_put(struct allocation new, struct allocation *old);
bool allocations_find(enum kind kind, uint64_t key, struct allocation *out);
bool allocations_retain(enum kind kind, uint64_t key);

/* Turns OWN into EXPORTED. True for the first call only. */
bool allocations_export(enum kind kind, uint64_t key, struct allocation *out);

/* Sets the export lock of an exported BLOCK unless it has one, or sets NO_EXPORT_LOCK. Returns what it now has. */
uint64_t allocations_set_export_lock(uint64_t key, uint64_t first_byte);

/* DEFERRED blocks, by export lock: marks one as seen in this pass, and removes the unseen ones one at a time. */
void allocations_mark_seen(uint64_t first_byte, uint32_t pass);
bool allocations_take_unseen(unsigned *shard, uint32_t pass, struct allocation *taken);

/* Raises the size of an IMPORTED block. Returns the difference. */
uint64_t allocations_grow(uint64_t key, uint8_t card, uint64_t bytes);

/* Counts a launch of a GRAPH. */
void allocations_count_launch(uint64_t graph);

/* Records that a NODE's memory was freed after this number of launches. */
void allocations_node_freed(uint64_t node, uint32_t launches);

/* Drops one reference. True if it was the last one; then the allocation is removed. */
bool allocations_release(enum kind kind, uint64_t key, struct allocation *removed);

/* Removes an allocation whatever its number of references. False if there is none. */
bool allocations_take(enum kind kind, uint64_t key, struct allocation *taken);

/* Removes the owner's memory, one allocation at a time, with `*shard` starting at 0. False when there is no more. */
bool allocations_take_owned(unsigned *shard, uint64_t owner, struct allocation *taken);

void allocations_reset(void); /* in a child after fork */
#endif
