/* Where the driver maps memory: one reserved range of the process's addresses, as in NVIDIA's driver. An address in it is
 * never the host's, so that an address of freed memory is recognised. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "driver.h"

#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
#define RESERVED (1ull << 43) /* more than 16 cards of 288 GB hold */
#define SMALLEST (1ull << 32)
#define UNIT 65536u

struct gap {
    uintptr_t base;
    size_t size;
    struct gap *next; /* the next higher one, never adjacent */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t begin, end;
static struct gap *gaps;

static size_t whole(size_t bytes) { return (bytes + UNIT - 1) / UNIT * UNIT; }

/* The parent's range stays mapped, but belongs to nobody. */
void addresses_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    begin = end = 0;
    gaps = NULL;
}

/* Under the lock. A program with a limit of addresses keeps them for itself. */
static void reserve(void) {
    struct rlimit limit;
    if (begin || getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY || !(gaps = malloc(sizeof *gaps)))
        return;
    for (size_t size = RESERVED; size >= SMALLEST; size /= 2) {
        void *base = mmap(NULL, size, PROT_NONE, NOTHING, -1, 0);
        if (base == MAP_FAILED)
            continue;
        begin = (uintptr_t)base;
        end = begin + size;
        *gaps = (struct gap){whole(begin), end - whole(begin), NULL};
        return;
    }
    free(gaps);
    gaps = NULL;
}

/* Under the lock. Takes a range out of the gap that *place names; false without memory. */
static bool carve(struct gap **place, uintptr_t base, size_t size) {
    struct gap *gap = *place;
    uintptr_t stop = gap->base + gap->size;
    if (base > gap->base && base + size < stop) {
        struct gap *above = malloc(sizeof *above);
        if (!above)
            return false;
        *above = (struct gap){base + size, stop - base - size, gap->next};
        gap->size = base - gap->base;
        gap->next = above;
    } else if (base > gap->base) {
        gap->size = base - gap->base;
    } else if (size < gap->size) {
        *gap = (struct gap){base + size, gap->size - size, gap->next};
    } else {
        *place = gap->next;
        free(gap);
    }
    return true;
}

/* Under the lock. At the wish if that is free, else at the lowest place; 0 if nothing is large enough. */
static uintptr_t find(size_t size, size_t alignment, uintptr_t wish) {
    for (int wished = wish != 0; wished >= 0; wished--)
        for (struct gap **place = &gaps; *place; place = &(*place)->next) {
            uintptr_t first = (*place)->base, stop = first + (*place)->size;
            uintptr_t at = wished ? wish : (first + alignment - 1) / alignment * alignment;
            if (at % alignment == 0 && at % UNIT == 0 && at >= first && at <= stop && size <= stop - at)
                return carve(place, at, size) ? at : 0;
        }
    return 0;
}

/* Outside of the reserved range. */
static uintptr_t anywhere(size_t size, size_t alignment, uintptr_t wish) {
    void *mapped = mmap((void *)wish, size + alignment, PROT_NONE, NOTHING, -1, 0);
    if (mapped == MAP_FAILED)
        return 0;
    uintptr_t low = (uintptr_t)mapped, at = (low + alignment - 1) / alignment * alignment;
    if (at > low)
        munmap(mapped, at - low);
    munmap((void *)(at + size), low + alignment - at);
    return at;
}

uintptr_t addresses_take(size_t bytes, size_t alignment, uintptr_t wish) {
    if (bytes > SIZE_MAX / 4 || alignment > SIZE_MAX / 4)
        return 0;
    if (alignment < UNIT)
        alignment = UNIT;
    pthread_mutex_lock(&lock);
    reserve();
    bool outside = wish && (wish < begin || wish >= end);
    uintptr_t base = outside ? 0 : find(whole(bytes), alignment, wish);
    pthread_mutex_unlock(&lock);
    return base ? base : anywhere(whole(bytes), alignment, wish);
}

bool addresses_contain(uintptr_t address) {
    pthread_mutex_lock(&lock);
    bool inside = address >= begin && address < end;
    pthread_mutex_unlock(&lock);
    return inside;
}

/* Under the lock. Without memory for a new gap, the range is not used again. */
static void add_gap(uintptr_t base, size_t size) {
    struct gap **place = &gaps, *below = NULL;
    while (*place && (*place)->base < base) {
        below = *place;
        place = &below->next;
    }
    struct gap *above = *place;
    if (above && base + size == above->base) {
        above->base = base;
        above->size += size;
    } else {
        struct gap *made = malloc(sizeof *made);
        if (!made)
            return;
        *made = (struct gap){base, size, above};
        *place = above = made;
    }
    if (below && below->base + below->size == above->base) {
        below->size += above->size;
        below->next = above->next;
        free(above);
    }
}

void addresses_give_back(uintptr_t base, size_t bytes) {
    size_t size = whole(bytes);
    pthread_mutex_lock(&lock);
    if (base < begin || base >= end)
        munmap((void *)base, size);
    else if (mmap((void *)base, size, PROT_NONE, NOTHING | MAP_FIXED, -1, 0) != MAP_FAILED)
        add_gap(base, size);
    pthread_mutex_unlock(&lock);
}
