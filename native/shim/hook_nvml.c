/* NVML sees the lease's cards only, by the numbers that the program knows them by, and its processes only. */
#include <stdlib.h>
#include <string.h>

#include "account.h"
#include "control.h"
#include "lease.h"
#include "process_list.h"
#include "hook_meminfo.h"


int nvml_card(nvmlDevice_t device) {
    char uuid[96];
    if (REAL_NVML(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != NVML_SUCCESS || strlen(uuid) < 40)
        return -1;
    return control_find_card(uuid + 4);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t result = lease_ready() ? REAL_NVML(nvmlDeviceGetCount_v2)(count) : BROKEN;
    if (result == NVML_SUCCESS)
        *count = control_cards();
    return result;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
    return nvmlDeviceGetCount_v2(count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (!lease_ready())
        return BROKEN;
    if (index >= control_cards())
        return NVML_ERROR_INVALID_ARGUMENT;
    return REAL_NVML(nvmlDeviceGetHandleByUUID)(control_uuid(index), device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t if_ours(nvmlReturn_t result, nvmlDevice_t *device) {
    if (result != NVML_SUCCESS)
        return result;
    if (!lease_ready())
        return BROKEN;
    return nvml_card(*device) < 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    return if_ours(REAL_NVML(nvmlDeviceGetHandleByUUID)(uuid, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device) {
    return if_ours(REAL_NVML(nvmlDeviceGetHandleByUUIDV)(uuid, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    return if_ours(REAL_NVML(nvmlDeviceGetHandleBySerial)(serial, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device) {
    return if_ours(REAL_NVML(nvmlDeviceGetHandleByPciBusId)(bus, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    return if_ours(REAL_NVML(nvmlDeviceGetHandleByPciBusId_v2)(bus, device), device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    nvmlReturn_t result = lease_ready() ? REAL_NVML(nvmlDeviceGetIndex)(device, index) : BROKEN;
    int card = result == NVML_SUCCESS ? nvml_card(device) : -1;
    if (card >= 0)
        *index = (unsigned int)card;
    return result;
}

static nvmlReturn_t slice(nvmlReturn_t result, nvmlDevice_t device, uint64_t *free, uint64_t *total, uint64_t *used) {
    if (result != NVML_SUCCESS)
        return result;
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return BROKEN;
    slice_meminfo((unsigned)card, free, total);
    *used = *total - *free;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = REAL_NVML(nvmlDeviceGetMemoryInfo)(device, memory);
    return slice(result, device, (uint64_t *)&memory->free, (uint64_t *)&memory->total, (uint64_t *)&memory->used);
}

/* What the card reserves for itself is not part of the slice. */
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = REAL_NVML(nvmlDeviceGetMemoryInfo_v2)(device, memory);
    if (result == NVML_SUCCESS)
        memory->reserved = 0;
    return slice(result, device, (uint64_t *)&memory->free, (uint64_t *)&memory->total, (uint64_t *)&memory->used);
}

static const char *in_driver(const struct process_list *list, uint32_t pid) {
    for (unsigned int i = 0; i < list->in_driver; i++) {
        const char *entry = list->driver + i * list->stride;
        if (((const struct process *)entry)->pid == pid)
            return entry;
    }
    return NULL;
}

/* The driver names processes as the host does, which in a container are other numbers: there the account
 * alone knows who they are. Memory is the account's in any case, so that the lines add up to `used`. */
void process_list_filter(struct process_list *list, unsigned card, bool compute) {
    uint32_t pid;
    uint64_t bytes;
    int slot = -1;
    account_reap(card);
    while ((slot = account_next_process((unsigned)(slot + 1), card, &pid, &bytes)) >= 0 && list->count < MAX_PROCESSES) {
        const char *known = in_driver(list, pid);
        if (!known && !(compute && bytes))
            continue;
        char *entry = list->kept + list->count++ * list->stride;
        if (known)
            memcpy(entry, known, list->stride);
        else
            memset(entry, 0xff, list->stride);
        ((struct process *)entry)->pid = pid;
        ((struct process *)entry)->bytes = bytes;
    }
}

static nvmlReturn_t answer(const struct process_list *list, unsigned int *count, void *out) {
    unsigned int room = *count;
    *count = list->count;
    if (room < list->count || (!out && list->count))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (list->count)
        memcpy(out, list->kept, list->count * list->stride);
    return NVML_SUCCESS;
}

static nvmlReturn_t processes(process_function real, nvmlDevice_t device, unsigned int *count, void *out, size_t stride,
                              bool compute) {
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return BROKEN;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    char *room = malloc(2 * MAX_PROCESSES * stride);
    struct process_list list = {room, room + MAX_PROCESSES * stride, stride, MAX_PROCESSES, 0};
    nvmlReturn_t result = room ? real(device, &list.in_driver, room) : NVML_ERROR_MEMORY;
    if (result == NVML_SUCCESS) {
        process_list_filter(&list, (unsigned)card, compute);
        result = answer(&list, count, out);
    }
    free(room);
    return result;
}

#define PROCESS_LIST(name, type, compute)                                                                  \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *out) {                               \
        _Static_assert(offsetof(type, usedGpuMemory) == offsetof(struct process, bytes), "they begin alike"); \
        return processes((process_function)REAL_NVML(name), device, count, out, sizeof *out, compute);       \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, false)
