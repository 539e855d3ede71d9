/* What this process holds: driver object -> bytes charged for it.
 *
 * Sharded, so that threads that allocate at once seldom meet. */
#ifndef FENKA_HOLDINGS_H
#define FENKA_HOLDINGS_H
#include <stdbool.h>
#include <stdint.h>

/* Objects of different kinds may have equal handles. */
enum kind {
    NOTHING,
    POINTER, ARRAY, MIPMAP, HEAP, MODULE, OPENED, NODE, /* memory that may have an owner */
    BLOCK, MAPPING, LEFT, POOL, CONTEXT, GRAPH, EXEC, LIBRARY
};

#define NO_CARD 255 /* known, but no card's memory: host pools */

struct allocation {
    uint64_t key;
    uint64_t bytes; /* GRAPH: how often it was launched */
    uint64_t owner; /* POINTER, ARRAY, MIPMAP, HEAP, MODULE, OPENED: the context that it dies with; NODE, EXEC: the
                       graph; MAPPING: its BLOCK; BLOCK: its mark once it was exported; 0 = none */
    uint32_t references; /* NODE: 1 + launches that the graph had seen when this was freed last */
    uint8_t kind, card;
    uint8_t shared; /* BLOCK, POINTER */
};

/* What a BLOCK or a POINTER is; a POOLED one is charged to its pool, one that is GRAPHED has outlived its graph. */
enum { OWN, EXPORTED, IMPORTED, POOLED, GRAPHED };
#define NO_EXPORT_LOCK 1                /* the mark of a block whose descriptor cannot bear one */

/* Replaces one of the same key and kind, which the program must have freed where nobody saw it, and gives it
 * back in `old`. False without host memory: the charge then stays, which errs on the safe side. */
bool allocations_put(struct allocation new, struct allocation *old);
bool allocations_find(enum kind kind, uint64_t key, struct allocation *out);
bool allocations_retain(enum kind kind, uint64_t key);

/* One's own becomes EXPORTED: true for the first who says so. */
bool allocations_export(enum kind kind, uint64_t key, struct allocation *out);
/* What mark an exported BLOCK has, from the first who says so on, or that it has none; the one that holds. */
uint64_t allocations_set_export_lock(uint64_t key, uint64_t mark);

/* Of blocks LEFT behind by their mark: this one is there in this pass; those that are not, one at a time. */
void allocations_mark_seen(uint64_t mark, uint32_t pass);
bool allocations_take_unseen(unsigned *shard, uint32_t pass, struct allocation *gone);

/* An IMPORTED block turns out to be of this size; the bytes by which it was thought smaller. */
uint64_t allocations_grow(uint64_t key, uint8_t card, uint64_t bytes);

/* One launch of a GRAPH. */
void allocations_count_launch(uint64_t graph);
/* The memory of a NODE is freed, after so many launches. */
void allocations_node_freed(uint64_t node, uint32_t launches);

/* Drops one reference; true when it was the last and the holding is gone. */
bool allocations_release(enum kind kind, uint64_t key, struct allocation *gone);

/* Removes it, however many references it has; false when it is not there. */
bool allocations_take(enum kind kind, uint64_t key, struct allocation *gone);

/* Removes memory that belongs to the owner, one at a time, `*shard` starting at 0; false when there is no more. */
bool allocations_take_owned(unsigned *shard, uint64_t owner, struct allocation *gone);

void allocations_reset(void); /* in a child after fork */
#endif
