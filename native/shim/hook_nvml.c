/* NVML shows only the lease's cards, numbered as CUDA numbers them for the program, and only the lease's processes. */
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "lease.h"
#include "nvml_cards.h"
#include "process_list.h"
#include "slice_meminfo.h"

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t result = lease_ready() ? REAL_NVML(nvmlDeviceGetCount_v2)(count) : NVML_LEASE_BROKEN;
    if (result == NVML_SUCCESS)
        *count = control_cards();
    return result;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    return nvml_handle_by_index(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t if_in_lease(nvmlReturn_t result, nvmlDevice_t *device) {
    if (result != NVML_SUCCESS)
        return result;
    if (!lease_ready())
        return NVML_LEASE_BROKEN;
    return nvml_card(*device) < 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    return if_in_lease(REAL_NVML(nvmlDeviceGetHandleByUUID)(uuid, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device) {
    return if_in_lease(REAL_NVML(nvmlDeviceGetHandleByUUIDV)(uuid, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    return if_in_lease(REAL_NVML(nvmlDeviceGetHandleBySerial)(serial, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device) {
    return if_in_lease(REAL_NVML(nvmlDeviceGetHandleByPciBusId)(bus, device), device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    return if_in_lease(REAL_NVML(nvmlDeviceGetHandleByPciBusId_v2)(bus, device), device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    nvmlReturn_t result = lease_ready() ? REAL_NVML(nvmlDeviceGetIndex)(device, index) : NVML_LEASE_BROKEN;
    int card = result == NVML_SUCCESS ? nvml_card(device) : -1;
    if (card >= 0)
        *index = (unsigned int)card;
    return result;
}

static nvmlReturn_t meminfo_end(nvmlReturn_t result, nvmlDevice_t device, unsigned long long *free,
                                unsigned long long *total, unsigned long long *used) {
    if (result != NVML_SUCCESS)
        return result;
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return NVML_LEASE_BROKEN;
    uint64_t slice_free = *free, slice_total = *total;
    slice_meminfo((unsigned)card, &slice_free, &slice_total);
    *free = slice_free;
    *total = slice_total;
    *used = slice_total - slice_free;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = REAL_NVML(nvmlDeviceGetMemoryInfo)(device, memory);
    return meminfo_end(result, device, &memory->free, &memory->total, &memory->used);
}

/* Memory that the card reserves for itself is not part of the slice. */
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = REAL_NVML(nvmlDeviceGetMemoryInfo_v2)(device, memory);
    if (result == NVML_SUCCESS)
        memory->reserved = 0;
    return meminfo_end(result, device, &memory->free, &memory->total, &memory->used);
}

static nvmlReturn_t copy_list(const struct process_list *list, unsigned int *count, void *out) {
    unsigned int capacity = *count;
    *count = list->count;
    if (capacity < list->count || (!out && list->count))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (list->count)
        memcpy(out, list->kept, list->count * list->stride);
    return NVML_SUCCESS;
}

static nvmlReturn_t processes(process_function real, nvmlDevice_t device, unsigned int *count, void *out, size_t stride,
                              bool compute) {
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return NVML_LEASE_BROKEN;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    char *room = malloc(2 * MAX_PROCESSES * stride);
    struct process_list list = {room, room + MAX_PROCESSES * stride, stride, MAX_PROCESSES, 0};
    nvmlReturn_t result = room ? real(device, &list.in_driver, room) : NVML_ERROR_MEMORY;
    if (result == NVML_SUCCESS) {
        process_list_filter(&list, (unsigned)card, compute);
        result = copy_list(&list, count, out);
    }
    free(room);
    return result;
}

enum { MODE_COMPUTE = 0, MODE_ALL = 3 }; /* older headers have no names for them */

/* The programs of all modes in one list. Of those, only the ones that compute are known without the driver. */
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *out) {
    _Static_assert(offsetof(nvmlProcessDetail_v1_t, usedGpuMemory) == offsetof(struct process, bytes),
                   "common first fields");
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return NVML_LEASE_BROKEN;
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    size_t stride = sizeof *out->procArray;
    char *room = malloc(2 * MAX_PROCESSES * stride);
    struct process_list list = {room, room + MAX_PROCESSES * stride, stride, 0, 0};
    nvmlProcessDetailList_t asked = {out->version, out->mode, MAX_PROCESSES, (void *)room};
    nvmlReturn_t result = room ? REAL_NVML(nvmlDeviceGetRunningProcessDetailList)(device, &asked) : NVML_ERROR_MEMORY;
    if (result == NVML_SUCCESS) {
        list.in_driver = asked.numProcArrayEntries;
        process_list_filter(&list, (unsigned)card, out->mode == MODE_COMPUTE || out->mode == MODE_ALL);
        /* All ones is "unknown" in the other fields, and no number in this one. */
        nvmlProcessDetail_v1_t *kept = (void *)list.kept;
        for (unsigned int i = 0; i < list.count; i++)
            if (kept[i].usedGpuCcProtectedMemory == UINT64_MAX)
                kept[i].usedGpuCcProtectedMemory = 0;
        result = copy_list(&list, &out->numProcArrayEntries, out->procArray);
    }
    free(room);
    return result;
}

#define PROCESS_LIST(name, type, compute)                                                                        \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *out) {                                     \
        _Static_assert(offsetof(type, usedGpuMemory) == offsetof(struct process, bytes), "common first fields"); \
        return processes((process_function)REAL_NVML(name), device, count, out, sizeof *out, compute);           \
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
