/* A libnvidia-ml.so.1 that knows the cards of FENKA_NULL_CARDS, and on each of them the processes of
 * FENKA_NULL_PIDS, with 1 GiB each. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char handles[16];

static unsigned int card_count(void) {
    const char *all = getenv("FENKA_NULL_CARDS");
    unsigned int count = all && *all;
    for (; all && *all; all++)
        count += *all == ',';
    return count;
}

static unsigned int index_of(nvmlDevice_t device) {
    return (unsigned int)((char *)device - handles);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = card_count();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)&handles[index];
    return index < card_count() ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "%.40s", getenv("FENKA_NULL_CARDS") + 41 * index_of(device));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    const char *at = strstr(getenv("FENKA_NULL_CARDS"), uuid);
    if (!at)
        return NVML_ERROR_NOT_FOUND;
    *device = (nvmlDevice_t)&handles[(at - getenv("FENKA_NULL_CARDS")) / 41];
    return NVML_SUCCESS;
}

/* "0000:0N:00.0" is card N. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2((unsigned int)(bus[6] - '0'), device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    *index = index_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    *memory = (nvmlMemory_t){.total = 16ull << 30, .free = 16ull << 30};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    memory->total = 16ull << 30;
    memory->reserved = 1ull << 30;
    memory->free = 15ull << 30;
    memory->used = 0;
    return NVML_SUCCESS;
}

#define LIST(name, type)                                                      \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *out) {  \
        unsigned int room = *count, n = 0;                                    \
        char list[1024];                                                      \
        snprintf(list, sizeof list, "%s", getenv("FENKA_NULL_PIDS"));         \
        for (char *pid = strtok(list, ","); pid; pid = strtok(NULL, ","))     \
            if (n++ < room) {                                                 \
                out[n - 1].pid = (unsigned int)atoi(pid);                     \
                out[n - 1].usedGpuMemory = 1ull << 30;                        \
            }                                                                 \
        *count = n;                                                           \
        return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;        \
    }

LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list) {
    nvmlProcessInfo_t all[64];
    unsigned int room = list->numProcArrayEntries, count = 64;
    nvmlDeviceGetComputeRunningProcesses_v3(device, &count, all);
    list->numProcArrayEntries = count;
    if (count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < count; i++)
        list->procArray[i] = (nvmlProcessDetail_v1_t){.pid = all[i].pid, .usedGpuMemory = all[i].usedGpuMemory};
    return NVML_SUCCESS;
}

/* FENKA_NULL_TABLE: the driver's version, and the bytes that its private table says it has. */
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int room) {
    const char *said = getenv("FENKA_NULL_TABLE");
    snprintf(version, room, "%.*s", said ? (int)strcspn(said, ":") : 0, said ? said : "");
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id) {
    static void *slots[1024];
    const char *said = getenv("FENKA_NULL_TABLE");
    if (!said || !table || !id)
        return NVML_ERROR_INVALID_ARGUMENT;
    slots[0] = (void *)strtoul(said + strcspn(said, ":") + 1, NULL, 10);
    for (size_t i = 1; i < 1024; i++)
        slots[i] = (void *)i;
    *table = slots;
    return NVML_SUCCESS;
}

/* All cards but this one are near it, and all are near every CPU. */
static nvmlReturn_t cards_but(unsigned int one, unsigned int *count, nvmlDevice_t *devices) {
    unsigned int found = 0;
    for (unsigned int card = 0; card < card_count(); card++)
        if (card != one) {
            if (found < *count)
                devices[found] = (nvmlDevice_t)&handles[card];
            found++;
        }
    *count = found;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned int *count,
                                              nvmlDevice_t *devices) {
    return cards_but(index_of(device), count, devices);
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices) {
    return cards_but(99, count, devices);
}
