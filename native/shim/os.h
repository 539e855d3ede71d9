/* Everything that the shim uses of the operating system.
 *
 * Only calls that musl has as well: the library is preloaded into every program of a container, and one unresolved
 * symbol would keep all of them from starting. */
#ifndef FENKA_OS_H
#define FENKA_OS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct os_process {
    uint32_t pid;
    uint64_t start_time; /* clock ticks after boot */
    uint64_t namespace;  /* bits 0-31: inode of the PID namespace; 32-63: of the time namespace, 0 = there is none */
};

/* False if /proc does not show this process under its own PID; then it cannot be identified. */
bool os_self(struct os_process *self);

/* True only if it is certain that no process with this PID and start time (compared under the mask) runs. A zombie
 * counts as ended: it no longer holds device memory. */
bool os_process_ended(uint32_t pid, uint64_t start_time, uint64_t start_mask);

/* The cheap half of the above: one system call, which misses zombies and reused PIDs. */
bool os_process_absent(uint32_t pid);

enum os_result { OS_OK, OS_MISSING, OS_UNREADABLE, OS_WRONG_SIZE };

/* The path of the program that a process runs; false if it cannot be read. */
bool os_executable(uint32_t pid, char *path, size_t room);

/* Maps a file of exactly `bytes` bytes, shared. */
enum os_result os_map(const char *path, size_t bytes, bool writable, void **address);
/* Reads a whole file into pages of its own, for os_unmap. OS_WRONG_SIZE: it is empty, larger than the limit or than the
 * memory, no regular file, or became shorter meanwhile. */
enum os_result os_read_file(const char *path, size_t limit, size_t *bytes, void **address);
/* Guards a mapping against truncation of its file, after which an access raises SIGBUS. From now on empty private pages
 * replace such a mapping, and `lost` (if not NULL) is called in the signal handler. Other faults go to the previous
 * handler. */
void os_guard(void *address, size_t bytes, void (*lost)(void));
void os_unguard(void *address);
bool os_exists(const char *path); /* also if it must not be read */
/* Reads the beginning of a file as one string without line breaks, empty if it cannot be read. */
void os_read_text(const char *path, char *text, size_t room);
void os_unmap(void *address, size_t bytes);
/* Counts this process's mappings of the file that is mapped from its beginning at `address`; 0 = unknown. */
unsigned os_count_mappings(const void *address);
/* Sets a shared lock on a file's bytes [first, first + length) that belongs to the open file: it ends with the last
 * copy of the descriptor in any process. False if the file supports no locks. */
bool os_set_file_lock(int descriptor, uint64_t first, uint64_t length);
/* Opens a file and sets such a lock on one byte. The descriptor is inherited by fork and closed by exec; -1 if the file
 * cannot be opened or locked. */
int os_open_locked(const char *path, uint64_t byte);
/* Whether any open file has a lock on the byte; true if that is unknown. */
bool os_byte_locked(const char *path, uint64_t byte);
/* Calls `each` for such locks that a file of /proc lists; false if it cannot be read. */
bool os_each_file_lock(const char *path, void (*each)(void *to, uint64_t first, uint64_t last), void *to);
uint64_t os_random(void);           /* 64 bits, as unpredictable as possible */
void *os_alloc_pages(size_t bytes); /* zeroed; NULL without memory */
/* Moves a full table of os_alloc_pages to one of twice the capacity, or of `first` entries if it has none. NULL without
 * memory: then the table stays as it is. */
void *os_grow(void *table, size_t entry_bytes, size_t *capacity, size_t first);

/* A monotonic clock, coarse because it is read in every query. */
uint64_t os_milliseconds(void);

/* CLOCK_MONOTONIC, which other processes read too. */
uint64_t os_nanoseconds(void);
void os_sleep_until(uint64_t nanoseconds);

void os_yield(void);

bool os_is_first_process(void); /* of its PID namespace */
/* Lets SIGTERM and SIGINT end a first process, which they do not by themselves; or as they did before. */
void os_obey_signals(bool obey);
void os_print_error(const char *line); /* to standard error, in one write */

/* Locks are private to the process, so they end with it. */
struct os_lock {
    uint32_t held;
};

static inline void os_lock(struct os_lock *lock) {
    while (__builtin_expect(__atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE), 0))
        os_yield();
}

static inline void os_unlock(struct os_lock *lock) { __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE); }

/* Between an atomic read-modify-write and plain loads of what other processes wrote. On x86 a locked instruction is a
 * full barrier already, and a second one would cost as much as the charge itself. */
static inline void os_fence_after_update(void) {
#if defined(__x86_64__)
    __asm__ volatile("" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
#endif
