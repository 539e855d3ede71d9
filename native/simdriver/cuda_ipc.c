/* Showing memory and events to other processes. The card server keeps the descriptor of a process's
 * device memory and gives it to whoever knows its secret name, which travels in the IPC handle; so it
 * works across PID namespaces and ends with the process. Only the owner is charged, until the last who
 * has opened it has closed it; after the owner's end the card server sees to that. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_memory.h"
#include "driver.h"

#define MEMORY_MAGIC 0x6d656d31
#define EVENT_MAGIC 0x65766531
#define PAGE 4096
#define WAITER_STACK (64u << 10)
#define OFD_SETLK 37 /* F_OFD_SETLK, F_OFD_SETLKW */
#define OFD_SETLKW 38

struct handle {
    uint32_t magic, card;
    uint8_t token[NODE_TOKEN];
    uint64_t offset, size;
};
_Static_assert(sizeof(struct handle) <= CU_IPC_HANDLE_SIZE, "fits the public handle");

struct import {
    struct handle handle;
    uintptr_t base;
    unsigned count;
    struct import *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct import *imports;
static int line = -1; /* while it is open the server keeps our file */
static uint8_t token[NODE_TOKEN];

void ipc_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    imports = NULL;
    line = -1; /* not closed: the number may be someone else's by now, and the parent's line stays */
}

static bool publish(struct handle *handle)
{
    pthread_mutex_lock(&lock);
    if (line < 0)
        line = node_share(arena_file(), token);
    memcpy(handle->token, token, sizeof token);
    bool shared = line >= 0;
    pthread_mutex_unlock(&lock);
    return shared;
}

/* An opening of its own with a lock on the piece, which lasts as long as its mapping; -1 where there is another. */
static int open_locked(int file, short type, off_t offset, size_t bytes, bool wait)
{
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

/* The pages around the piece; 0 where it cannot be had. */
static uintptr_t map_piece(const struct handle *handle)
{
    int file = node_open_shared(handle->token);
    if (file < 0)
        return 0;
    size_t inside = handle->offset % PAGE;
    int opened = open_locked(file, F_RDLCK, (off_t)handle->offset, handle->size, false);
    close(file);
    void *base = mmap(NULL, inside + handle->size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, opened, (off_t)(handle->offset - inside));
    if (opened >= 0)
        close(opened);
    return base == MAP_FAILED ? 0 : (uintptr_t)base + inside;
}

struct piece {
    int file;
    uint32_t card;
    size_t bytes, charged;
    off_t offset;
};

static void *wait_for_importers(void *argument)
{
    struct piece *piece = argument;
    int opened = open_locked(piece->file, F_WRLCK, piece->offset, piece->bytes, true);
    arena_punch(piece->offset, piece->charged);
    sim_memory_release(piece->card, piece->charged);
    if (opened >= 0)
        close(opened);
    free(piece);
    return NULL;
}

bool import_outlives(const struct allocation *held)
{
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
    munmap((void *)held->base, held->charged);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WAITER_STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, wait_for_importers, piece) != 0)
        free(piece); /* it stays charged */
    pthread_attr_destroy(&attributes);
    return true;
}

void import_give_back(uintptr_t base, size_t bytes)
{
    munmap((void *)(base - base % PAGE), base % PAGE + bytes);
}

/* ---- memory ---- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer)
{
    struct allocation held;
    TRY(driver_ready());
    if (!out || !memory_find(pointer, &held) || held.kind != MEMORY_DEVICE || held.pool)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle handle = {.magic = MEMORY_MAGIC, .card = held.card,
                            .offset = (uint64_t)held.offset, .size = held.size};
    if (!publish(&handle))
        return CUDA_ERROR_MAP_FAILED;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

/* Under the lock. One that a context took with it when it ended is none any more. */
static struct import **import_of(const struct handle *handle, uintptr_t base)
{
    struct import **place = &imports;
    struct allocation held;
    while (*place) {
        struct import *seen = *place;
        if (!memory_find(seen->base, &held) || held.kind != MEMORY_IMPORTED) {
            *place = seen->next;
            free(seen);
        } else if (base ? seen->base == base
                        : memcmp(&seen->handle, handle, sizeof *handle) == 0) {
            break;
        } else {
            place = &seen->next;
        }
    }
    return place;
}

/* Under the lock. */
static CUresult import_new(const struct handle *handle, CUcontext context, CUdeviceptr *pointer)
{
    struct import *made = calloc(1, sizeof *made);
    uintptr_t base = made ? map_piece(handle) : 0;
    if (!base) {
        free(made);
        return made ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct allocation held = {.base = base, .size = handle->size, .kind = MEMORY_IMPORTED,
                              .context = context, .card = handle->card, .device = context->device,
                              .shared = true};
    CUresult result = memory_link(&held);
    if (result != CUDA_SUCCESS) {
        import_give_back(base, handle->size);
        free(made);
        return result;
    }
    *made = (struct import){*handle, base, 1, imports};
    imports = made;
    *pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle given, unsigned int flags)
{
    CUcontext context;
    struct handle handle;
    TRY(context_current(&context));
    memcpy(&handle, &given, sizeof handle);
    if (!pointer || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != MEMORY_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.card != context->card)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    struct import *seen = *import_of(&handle, 0);
    CUresult result = CUDA_SUCCESS;
    if (line >= 0 && memcmp(handle.token, token, sizeof token) == 0) {
        result = CUDA_ERROR_INVALID_CONTEXT; /* our own, as documented */
    } else if (seen) {
        seen->count++;
        *pointer = seen->base;
    } else {
        result = import_new(&handle, context, pointer);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    TRY(driver_ready());
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct import **place = pointer ? import_of(NULL, pointer) : NULL;
    struct import *seen = place ? *place : NULL;
    if (seen) {
        result = CUDA_SUCCESS;
        if (--seen->count == 0) {
            *place = seen->next;
            result = memory_drop(seen->base, 1u << MEMORY_IMPORTED);
            free(seen);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- events ---- */

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent event)
{
    struct handle handle = {.magic = EVENT_MAGIC, .size = sizeof(struct moment)};
    off_t offset;
    TRY(driver_ready());
    TRY(event_offset(event, &offset));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    handle.offset = (uint64_t)offset;
    if (!publish(&handle))
        return CUDA_ERROR_MAP_FAILED;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle given)
{
    CUcontext context;
    struct handle handle;
    TRY(context_current(&context));
    memcpy(&handle, &given, sizeof handle);
    if (!event || handle.magic != EVENT_MAGIC || handle.size != sizeof(struct moment))
        return CUDA_ERROR_INVALID_VALUE;
    if (line >= 0 && memcmp(handle.token, token, sizeof token) == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    uintptr_t base = map_piece(&handle);
    if (!base)
        return CUDA_ERROR_MAP_FAILED;
    CUresult result = event_from(event, context, (struct moment *)base);
    if (result != CUDA_SUCCESS)
        import_give_back(base, handle.size);
    return result;
}
