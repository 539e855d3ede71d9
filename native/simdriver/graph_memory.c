/* Address ranges of allocation nodes. A node has its address from the start, and memory from the launch on. The
 * memory is charged to a pool of the device that keeps everything until it is trimmed. */
#include <stdlib.h>
#include <sys/mman.h>

#include "graph.h"

#define PAGE 65536
#define NO_BACKING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct graph_memory *known; /* all ranges */

bool graph_memory_known(CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    const struct graph_memory *memory = known;
    while (memory && memory->base != address)
        memory = memory->next;
    pthread_mutex_unlock(&lock);
    return memory;
}

static void list(struct graph_memory *memory, bool add) {
    pthread_mutex_lock(&lock);
    if (add) {
        memory->next = known;
        if (known)
            known->previous = memory;
        known = memory;
    } else {
        if (memory->next)
            memory->next->previous = memory->previous;
        *(memory->previous ? &memory->previous->next : &known) = memory->next;
    }
    pthread_mutex_unlock(&lock);
}

void graph_memory_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    known = NULL;
}

CUresult graph_memory_new(CUdevice device, size_t bytes, struct graph_memory **out) {
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    struct graph_memory *made = size >= bytes ? calloc(1, sizeof *made) : NULL;
    uintptr_t base = made ? addresses_take(size, PAGE, 0) : 0;
    if (!base) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct graph_memory){base, size, device, 1, NULL, NULL};
    list(made, true);
    *out = made;
    return CUDA_SUCCESS;
}

/* The last holder frees the range, unless memory there is still allocated. */
void graph_memory_hold(struct graph_memory *memory, int change) {
    struct allocation held;
    if (__atomic_add_fetch(&memory->holders, (unsigned)change, __ATOMIC_ACQ_REL) > 0)
        return;
    list(memory, false);
    if (!memory_find(memory->base, &held))
        addresses_give_back(memory->base, memory->size);
    free(memory);
}

static void release(const struct allocation *held) {
    mmap((void *)held->base, held->size, PROT_NONE, NO_BACKING | MAP_FIXED, -1, 0);
    arena_punch(held->offset, held->size);
    pool_give_back(held->pool, held->charged);
}

CUresult graph_memory_take(const struct graph_memory *memory, CUcontext context, bool free_first) {
    struct allocation held = {.base = memory->base,
                              .size = memory->size,
                              .kind = MEMORY_GRAPH,
                              .charged = memory->size,
                              .context = context,
                              .card = device_cards[memory->device],
                              .device = memory->device,
                              .pool = pool_of_graphs(memory->device),
                              .shared = true,
                              .release = release};
    if (free_first)
        memory_drop(memory->base, 1u << MEMORY_GRAPH);
    if (!held.pool || !pool_take(held.pool, held.charged))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int file = arena_reserve(memory->size, held.card, &held.offset);
    CUresult result = file < 0 ? CUDA_ERROR_OUT_OF_MEMORY : memory_link(&held);
    if (result != CUDA_SUCCESS) { /* the last launch's memory was not freed before this launch */
        pool_give_back(held.pool, held.charged);
        return file < 0 ? result : CUDA_ERROR_INVALID_VALUE;
    }
    if (mmap((void *)held.base, held.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file,
             held.offset) != MAP_FAILED)
        return CUDA_SUCCESS;
    memory_drop(held.base, 1u << MEMORY_GRAPH);
    return CUDA_ERROR_OUT_OF_MEMORY;
}
