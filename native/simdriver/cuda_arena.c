/* The process's device memory: one file, mapped piece by piece. It is a file so that other processes can map
 * pieces (IPC), and a single one because a program may make more allocations than it may have descriptors.
 *
 * Offsets are never reused; freed pieces become holes. Each card has its own range of offsets. Pieces below 64 KiB
 * share blocks of one size each, because the number of mappings is limited, too. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "driver.h"

#define FILE_BYTES (1ll << 62)
#define CARD_BYTES (1ll << NODE_CARD_SHIFT)
#define BLOCK (2u << 20)
#define SMALLEST 512
#define CLASSES 8 /* 512 bytes … 64 KiB */

struct block {
    uintptr_t base;
    off_t offset;
    unsigned used, count;
    struct block *next;
    uint64_t taken[BLOCK / SMALLEST / 64];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static ino_t inode;
static off_t end[FENKA_NODE_CARDS];
static struct block *blocks[CLASSES];

int memory_file(const char *name) { return (int)syscall(SYS_memfd_create, name, 1u /* CLOEXEC */); }

/* The descriptor's number may have been reused: a program may close descriptors that it did not open. */
static bool file_is_ours(void) {
    struct stat found;
    return file >= 0 && fstat(file, &found) == 0 && found.st_ino == inode;
}

/* The child makes its own file; the parent's pieces are not mapped there. */
void arena_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (file_is_ours())
        close(file);
    file = -1;
    memset(end, 0, sizeof end);
    memset(blocks, 0, sizeof blocks);
}

static off_t reserve(size_t bytes, uint32_t card) {
    struct stat made;
    if (file < 0 && (file = memory_file("fenka-device-memory")) >= 0) {
        if (ftruncate(file, FILE_BYTES) == 0 && fstat(file, &made) == 0) {
            inode = made.st_ino;
        } else {
            close(file);
            file = -1;
        }
    }
    if (!file_is_ours() || (off_t)bytes > CARD_BYTES - BLOCK - end[card])
        return -1;
    off_t offset = (off_t)card * CARD_BYTES + end[card];
    end[card] += (off_t)((bytes + BLOCK - 1) / BLOCK * BLOCK);
    return offset;
}

int arena_reserve(size_t bytes, uint32_t card, off_t *offset) {
    pthread_mutex_lock(&lock);
    *offset = reserve(bytes, card);
    int found = *offset < 0 ? -1 : file;
    pthread_mutex_unlock(&lock);
    return found;
}

int arena_file(void) { return file_is_ours() ? file : -1; }

void arena_punch(off_t offset, size_t bytes) {
    if (file_is_ours())
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)bytes);
}

static unsigned class_of(size_t bytes) {
    unsigned class = 0;
    while (((size_t)SMALLEST << class) < bytes)
        class++;
    return class;
}

static uintptr_t map(size_t bytes, off_t offset) {
    uintptr_t base = addresses_take(bytes, BLOCK, 0);
    if (base && mmap((void *)base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file,
                     offset) == MAP_FAILED) {
        addresses_give_back(base, bytes);
        return 0;
    }
    return base;
}

static struct block *block_new(unsigned class) {
    struct block *block = calloc(1, sizeof *block);
    off_t offset = block ? reserve(BLOCK, 0) : -1;
    uintptr_t base = offset < 0 ? 0 : map(BLOCK, offset);
    if (!base) {
        free(block);
        return NULL;
    }
    block->base = base;
    block->offset = offset;
    block->count = BLOCK / (SMALLEST << class);
    block->next = blocks[class];
    return blocks[class] = block;
}

static uintptr_t small_take(unsigned class, off_t *offset) {
    struct block *block = blocks[class];
    while (block && block->used == block->count)
        block = block->next;
    if (!block && !(block = block_new(class)))
        return 0;
    unsigned index = 0;
    while (block->taken[index / 64] == UINT64_MAX)
        index += 64;
    index += (unsigned)__builtin_ctzll(~block->taken[index / 64]);
    block->taken[index / 64] |= 1ull << index % 64;
    block->used++;
    size_t at = (size_t)index * SMALLEST << class;
    *offset = block->offset + (off_t)at;
    return block->base + at;
}

uintptr_t arena_take(size_t bytes, uint32_t card, off_t *offset) {
    uintptr_t base = 0;
    pthread_mutex_lock(&lock);
    if (bytes < ARENA_MAPS_FROM) {
        base = small_take(class_of(bytes), offset);
    } else if ((*offset = reserve(bytes, card)) >= 0) {
        base = map(bytes, *offset);
    }
    pthread_mutex_unlock(&lock);
    return base;
}

/* Empty blocks are kept for later small pieces. */
static void small_give_back(unsigned class, uintptr_t base) {
    struct block *block = blocks[class];
    while (block && base - block->base >= BLOCK)
        block = block->next;
    if (!block)
        return;
    unsigned index = (unsigned)((base - block->base) / ((size_t)SMALLEST << class));
    block->taken[index / 64] &= ~(1ull << index % 64);
    block->used--;
}

void arena_give_back(uintptr_t base, size_t bytes, off_t offset) {
    pthread_mutex_lock(&lock);
    if (bytes < ARENA_MAPS_FROM) {
        small_give_back(class_of(bytes), base);
    } else {
        addresses_give_back(base, bytes);
        arena_punch(offset, bytes);
    }
    pthread_mutex_unlock(&lock);
}
