/* Everything the shim asks of the operating system.
 *
 * Only calls that musl has as well: the same file is preloaded into every program of a container, and one
 * unresolved symbol would kill them all. */
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

/* False where /proc does not show this process under its own PID: then it cannot be told from others. */
bool os_self(struct os_process *self);

/* True only when it is certain that no process runs with this PID and start time, of which the low
 * `start_bits` bits are given: a zombie no longer holds device memory and counts as gone. */
bool os_process_ended(uint32_t pid, uint64_t start_time, uint64_t start_mask);

/* The cheap half of the above: one system call, blind to zombies and to a PID used again. */
bool os_process_absent(uint32_t pid);

enum os_result { OS_OK, OS_MISSING, OS_UNREADABLE, OS_WRONG_SIZE };

/* The path of the program that a process runs; false where that cannot be known. */
bool os_executable(uint32_t pid, char *path, size_t room);

/* Maps a file of exactly `bytes` bytes, shared. */
enum os_result os_map(const char *path, size_t bytes, bool writable, void **address);
/* Maps a file of any size but nothing, to be read by this process alone. */
enum os_result os_map_file(const char *path, size_t *bytes, void **address);
/* Who makes a file shorter takes its pages away from all that have mapped it; the next touch is a SIGBUS. From now on
 * an empty page of this process's own takes the place of such a mapping, and `lost` is called, in the signal's
 * handler. Other faults go where they went before. NULL = nothing to do but that. */
void os_guard(void *address, size_t bytes, void (*lost)(void));
void os_unguard(void *address);
bool os_exists(const char *path); /* also when it is there but must not be read */
void os_unmap(void *address, size_t bytes);
/* How often this process has the file mapped that is mapped from its beginning at `address`; 0 = unknown. */
unsigned os_count_mappings(const void *address);
/* A lock on a file's bytes [first, first + length) that belongs to the open file: it ends with the last copy of the
 * descriptor, in whatever process. It excludes nobody. False where the file takes none. */
bool os_set_file_lock(int descriptor, uint64_t first, uint64_t length);
/* Such locks as a file of /proc lists; false where it cannot be read. */
bool os_each_file_lock(const char *path, void (*each)(void *to, uint64_t first, uint64_t last), void *to);
uint64_t os_random(void); /* 64 bits that nobody foresees, or hardly */
void *os_alloc_pages(size_t bytes); /* zeroed; NULL when there are none */

/* Some clock that never goes back, in milliseconds; coarse, for it is asked in every query. */
uint64_t os_milliseconds(void);

/* The same clock, exactly and in nanoseconds, as other processes read it too. */
uint64_t os_nanoseconds(void);
void os_sleep_until(uint64_t nanoseconds);

void os_yield(void);
void os_print_error(const char *line); /* to standard error, in one write */

/* Locks are private to the process, so a killed process takes its locks with it. */
struct os_lock {
    uint32_t held;
};

static inline void os_lock(struct os_lock *lock) {
    while (__builtin_expect(__atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE), 0))
        os_yield();
}

static inline void os_unlock(struct os_lock *lock) {
    __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE);
}

/* After an atomic read-modify-write, before plain loads of what other processes wrote. On x86 a locked
 * instruction is a full barrier already, and a second one would cost as much as the charge itself. */
static inline void os_fence_after_update(void) {
#if defined(__x86_64__)
    __asm__ volatile("" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
#endif
