/* Locks on exported descriptors, which show whether any copy of a descriptor is still open in any process (lease.h).
 * An export lock is a file lock far beyond the end of the descriptor's open file. The kernel drops it with the last
 * copy. */
#ifndef FENKA_EXPORT_LOCKS_H
#define FENKA_EXPORT_LOCKS_H
#include <stdbool.h>
#include <stdint.h>

struct export_lock {
    uint64_t first; /* byte */
    uint64_t bytes; /* size of the block, rounded up to whole units */
};

/* False if the descriptor does not support locks. */
bool export_lock_set(int descriptor, uint64_t first, uint64_t bytes);

/* Reads the lock of a descriptor that came from another process. False if it has none. */
bool export_lock_read(int descriptor, struct export_lock *out);

/* Calls `each` for every export lock on this machine. False if the system does not list them; then any descriptor may
 * still be open. */
bool export_locks_each(void (*each)(void *to, const struct export_lock *export_lock), void *to);
#endif
