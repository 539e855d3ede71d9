/* The card server keeps the descriptor of a process's device memory and passes it to processes that know its
 * secret name. */
#include "ipc_share.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_memory.h"

#define PAGE 4096
#define WAITER_STACK (64u << 10)
#define OFD_SETLK 37 /* F_OFD_SETLK, F_OFD_SETLKW */
#define OFD_SETLKW 38

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int line = -1; /* while it is open the server keeps this process's file */
static uint8_t token[NODE_TOKEN];

void ipc_share_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    line = -1; /* not closed: the number may have been reused, and the parent's connection stays */
}

bool ipc_publish(struct ipc_handle *handle) {
    pthread_mutex_lock(&lock);
    if (line < 0)
        line = node_share(arena_file(), token);
    memcpy(handle->token, token, sizeof token);
    bool shared = line >= 0;
    pthread_mutex_unlock(&lock);
    return shared;
}

/* Opens the file again, with a lock on the piece that lasts as long as its mapping; -1 if a conflicting lock exists. */
static int open_locked(int file, short type, off_t offset, size_t bytes, bool wait) {
    char path[40];
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = (off_t)bytes};
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    int failed;
    while (opened >= 0 && (failed = fcntl(opened, wait ? OFD_SETLKW : OFD_SETLK, &lock)) != 0 && errno == EINTR)
        ;
    if (opened >= 0 && failed != 0) {
        close(opened);
        return -1;
    }
    return opened;
}

uintptr_t ipc_map(const struct ipc_handle *handle) {
    int file = node_open_shared(handle->token);
    if (file < 0)
        return 0;
    size_t inside = handle->offset % PAGE;
    int opened = open_locked(file, F_RDLCK, (off_t)handle->offset, handle->size, false);
    close(file);
    uintptr_t base = opened < 0 ? 0 : addresses_take(inside + handle->size, PAGE, 0);
    bool mapped =
        base && mmap((void *)base, inside + handle->size, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_NORESERVE | MAP_FIXED, opened, (off_t)(handle->offset - inside)) != MAP_FAILED;
    if (opened >= 0)
        close(opened);
    if (base && !mapped)
        addresses_give_back(base, inside + handle->size);
    return mapped ? base + inside : 0;
}

bool ipc_is_own(const struct ipc_handle *handle) {
    return __atomic_load_n(&line, __ATOMIC_ACQUIRE) >= 0 && memcmp(handle->token, token, sizeof token) == 0;
}

struct piece {
    int file;
    uint32_t card;
    size_t bytes, charged;
    off_t offset;
};

static void *wait_for_importers(void *argument) {
    struct piece *piece = argument;
    int opened = open_locked(piece->file, F_WRLCK, piece->offset, piece->bytes, true);
    arena_punch(piece->offset, piece->charged);
    sim_memory_release(piece->card, piece->charged);
    if (opened >= 0)
        close(opened);
    free(piece);
    return NULL;
}

bool import_outlives(const struct allocation *held) {
    pthread_t thread;
    pthread_attr_t attributes;
    if (__atomic_load_n(&line, __ATOMIC_ACQUIRE) < 0 || held->charged < ARENA_MAPS_FROM)
        return false;
    int opened = open_locked(arena_file(), F_WRLCK, held->offset, held->size, false);
    struct piece *piece = opened < 0 ? malloc(sizeof *piece) : NULL;
    if (opened >= 0)
        close(opened);
    if (!piece)
        return false;
    *piece = (struct piece){arena_file(), held->card, held->size, held->charged, held->offset};
    addresses_give_back(held->base, held->charged);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WAITER_STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, wait_for_importers, piece) != 0)
        free(piece); /* the memory stays charged */
    pthread_attr_destroy(&attributes);
    return true;
}

void ipc_unmap(uintptr_t base, size_t bytes) { addresses_give_back(base - base % PAGE, base % PAGE + bytes); }
