/* ECC: enabled if the model has it. All errors are of the device memory. */
#include "nvml_device.h"

#include <string.h>

static nvmlReturn_t ecc_card(nvmlDevice_t device, uint32_t *card) {
    TRY(nvml_card(device, card));
    return node_state->faults[*card].ecc ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
    uint32_t card;
    TRY(ecc_card(device, &card));
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
    nvmlEnableState_t current;
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetEccMode(device, &current, mode);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t kind, nvmlEccCounterType_t since,
                                         unsigned long long *count) {
    uint32_t card;
    TRY(ecc_card(device, &card));
    if (!count || kind >= NVML_MEMORY_ERROR_TYPE_COUNT || since >= NVML_ECC_COUNTER_TYPE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct fenka_node_faults *faults = &node_state->faults[card];
    uint64_t *counters = since == NVML_VOLATILE_ECC ? faults->ecc_volatile : faults->ecc_aggregate;
    *count = __atomic_load_n(&counters[kind], __ATOMIC_RELAXED);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t kind,
                                             nvmlEccCounterType_t since, nvmlMemoryLocation_t where,
                                             unsigned long long *count) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!count || (!target.mig && where >= NVML_MEMORY_LOCATION_COUNT))
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    if (target.mig) /* errors are counted by the card */
        return NVML_SUCCESS;
    TRY(nvmlDeviceGetTotalEccErrors(device, kind, since, count));
    if (where != NVML_MEMORY_LOCATION_DEVICE_MEMORY)
        *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t kind, nvmlEccCounterType_t since,
                                            nvmlEccErrorCounts_t *counts) {
    unsigned long long total;
    if (!counts)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvmlDeviceGetTotalEccErrors(device, kind, since, &total));
    memset(counts, 0, sizeof *counts);
    counts->deviceMemory = total;
    return NVML_SUCCESS;
}
