/* Marks on exported descriptors, which tell whether any copy of one is still open, in whatever process: see
 * lease.h. A mark is a lock on the descriptor's open file, far behind its end; the kernel drops it with the last
 * copy. */
#ifndef FENKA_MARKS_H
#define FENKA_MARKS_H
#include <stdbool.h>
#include <stdint.h>

struct export_lock {
    uint64_t first;
    uint64_t bytes; /* rounded up to whole units */
};

/* False where the descriptor cannot bear one. */
bool export_lock_set(int descriptor, uint64_t first, uint64_t bytes);
/* The mark of a descriptor that came from another process; false where it has none. */
bool export_lock_read(int descriptor, struct export_lock *out);

/* All marks there are, one call each. False where the system does not show them: then all may be there. */
bool export_locks_each(void (*each)(void *to, const struct export_lock *mark), void *to);
#endif
