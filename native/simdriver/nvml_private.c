/* The private table that nvidia-smi uses in addition to NVML's public functions. Without it nvidia-smi reports
 * that its version and the library's do not match. NVIDIA published parts of it under Apache-2.0 in
 * NVIDIA/k8s-test-infra, for the mock of NVML of its own tests. The unknown functions return "not supported",
 * which nvidia-smi shows as N/A. */
#include <stdio.h>
#include <string.h>

#include "nvml_device.h"

#define SLOTS 512 /* the table's first word says its bytes */
#define HANDLE_BY_INDEX 81
#define FIRST_PROCESS_LIST 213
#define LAST_PROCESS_LIST 215

static const unsigned char smi_table[] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                          0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

struct listed {
    uint32_t pid;
    uint32_t unused;
    uint64_t bytes;
    uint32_t gpu_instance, compute_instance;
    uint64_t protected_bytes;
    char name[4096];
};
_Static_assert(sizeof(struct listed) == 4128, "nvidia-smi steps through the list in these");

static nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* *count is the capacity on entry, and the number of entries on return. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, struct listed *list) {
    nvmlProcessInfo_t found[FENKA_NODE_SLOTS];
    unsigned number = FENKA_NODE_SLOTS;
    if (!count || !list)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvmlDeviceGetComputeRunningProcesses_v3(device, &number, found));
    if (number > *count)
        number = *count;
    for (unsigned i = 0; i < number; i++) {
        struct listed *entry = &list[i];
        memset(entry, 0, sizeof *entry);
        entry->pid = found[i].pid;
        entry->bytes = found[i].usedGpuMemory;
        entry->gpu_instance = found[i].gpuInstanceId;
        entry->compute_instance = found[i].computeInstanceId;
        if (nvmlSystemGetProcessName(entry->pid, entry->name, sizeof entry->name) != NVML_SUCCESS)
            snprintf(entry->name, sizeof entry->name, "[Not Found]");
    }
    *count = number;
    return NVML_SUCCESS;
}

/* All processes are compute processes, and the other lists are empty. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned *count) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t not_known(void) { return NVML_ERROR_NOT_SUPPORTED; }

void fenka_simulated_nvml(void) {}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id) {
    static const void *slots[SLOTS];
    if (!table || !id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *table = NULL;
    if (memcmp(id, smi_table, sizeof smi_table) != 0)
        return NVML_ERROR_NOT_FOUND;
    for (int slot = 1; slot < SLOTS; slot++)
        slots[slot] = (const void *)(uintptr_t)not_known;
    slots[0] = (const void *)(uintptr_t)sizeof slots;
    slots[HANDLE_BY_INDEX] = (const void *)(uintptr_t)handle_by_index;
    slots[FIRST_PROCESS_LIST] = (const void *)(uintptr_t)processes;
    for (int slot = FIRST_PROCESS_LIST + 1; slot <= LAST_PROCESS_LIST; slot++)
        slots[slot] = (const void *)(uintptr_t)no_processes;
    *table = slots;
    return NVML_SUCCESS;
}
