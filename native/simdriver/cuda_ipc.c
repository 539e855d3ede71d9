/* IPC handles of memory and events. The card server keeps the descriptor of a process's device memory and passes it to
 * processes that know its secret name, which is in the IPC handle. So IPC works across PID namespaces and ends with the
 * process. Only the owner is charged, until the last importer has closed the memory; after the owner's end the card
 * server keeps the charge. */
#include <stdlib.h>
#include <string.h>

#include "ipc_share.h"

#define MEMORY_MAGIC 0x6d656d31
#define EVENT_MAGIC 0x65766531

struct import {
    struct ipc_handle handle;
    uintptr_t base;
    unsigned count;
    struct import *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct import *imports;

void ipc_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    imports = NULL;
}

/* ---- memory ---- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer) {
    struct allocation held;
    TRY(driver_ready());
    if (!out || !memory_find(pointer, &held) || held.kind != MEMORY_DEVICE || held.pool)
        return CUDA_ERROR_INVALID_VALUE;
    struct ipc_handle handle = {
        .magic = MEMORY_MAGIC, .card = device_memory(held.card), .offset = (uint64_t)held.offset, .size = held.size};
    if (!ipc_publish(&handle))
        return CUDA_ERROR_MAP_FAILED;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

/* Under the lock. Removes imports that have ended with their context. */
static struct import **import_of(const struct ipc_handle *handle, uintptr_t base) {
    struct import **place = &imports;
    struct allocation held;
    while (*place) {
        struct import *seen = *place;
        if (!memory_find(seen->base, &held) || held.kind != MEMORY_IMPORTED) {
            *place = seen->next;
            free(seen);
        } else if (base ? seen->base == base : memcmp(&seen->handle, handle, sizeof *handle) == 0) {
            break;
        } else {
            place = &seen->next;
        }
    }
    return place;
}

static void release_import(const struct allocation *held) { ipc_unmap(held->base, held->size); }

/* Under the lock. */
static CUresult import_new(const struct ipc_handle *handle, CUcontext context, CUdeviceptr *pointer) {
    struct import *made = calloc(1, sizeof *made);
    uintptr_t base = made ? ipc_map(handle) : 0;
    if (!base) {
        free(made);
        return made ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct allocation held = {.base = base,
                              .size = handle->size,
                              .kind = MEMORY_IMPORTED,
                              .context = context,
                              .card = handle->card,
                              .device = context->device,
                              .shared = true,
                              .release = release_import};
    CUresult result = memory_link(&held);
    if (result != CUDA_SUCCESS) {
        ipc_unmap(base, handle->size);
        free(made);
        return result;
    }
    *made = (struct import){*handle, base, 1, imports};
    imports = made;
    *pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle given, unsigned int flags) {
    CUcontext context;
    struct ipc_handle handle;
    TRY(context_current(&context));
    memcpy(&handle, &given, sizeof handle);
    if (!pointer || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != MEMORY_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.card != device_memory(context->card))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    struct import *seen = *import_of(&handle, 0);
    CUresult result = CUDA_SUCCESS;
    if (ipc_is_own(&handle)) {
        result = CUDA_ERROR_INVALID_CONTEXT; /* of this process, as documented */
    } else if (seen) {
        seen->count++;
        *pointer = seen->base;
    } else {
        result = import_new(&handle, context, pointer);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
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

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent event) {
    struct ipc_handle handle = {.magic = EVENT_MAGIC, .size = sizeof(struct moment)};
    off_t offset;
    TRY(driver_ready());
    TRY(event_offset(event, &offset));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    handle.offset = (uint64_t)offset;
    if (!ipc_publish(&handle))
        return CUDA_ERROR_MAP_FAILED;
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle given) {
    CUcontext context;
    struct ipc_handle handle;
    TRY(context_current(&context));
    memcpy(&handle, &given, sizeof handle);
    if (!event || handle.magic != EVENT_MAGIC || handle.size != sizeof(struct moment))
        return CUDA_ERROR_INVALID_VALUE;
    if (ipc_is_own(&handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    uintptr_t base = ipc_map(&handle);
    if (!base)
        return CUDA_ERROR_MAP_FAILED;
    CUresult result = event_from(event, context, (struct moment *)base);
    if (result != CUDA_SUCCESS)
        ipc_unmap(base, handle.size);
    return result;
}
