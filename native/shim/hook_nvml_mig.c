/* A MIG instance of the lease looks like a card that has no MIG: many programs break on instances. */
#include <string.h>

#include "control.h"
#include "lease.h"
#include "nvml_cards.h"

static bool is_instance(nvmlDevice_t device) {
    int card = lease_ready() ? nvml_card(device) : -1;
    return card >= 0 && !strncmp(control_uuid((unsigned)card), "MIG-", 4);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    return is_instance(device) ? NVML_ERROR_NOT_SUPPORTED : REAL_NVML(nvmlDeviceGetMigMode)(device, current, pending);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    if (!count || !is_instance(device))
        return REAL_NVML(nvmlDeviceGetMaxMigDeviceCount)(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *handle) {
    return is_instance(device) ? NVML_ERROR_NOT_SUPPORTED
                               : REAL_NVML(nvmlDeviceGetMigDeviceHandleByIndex)(device, index, handle);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    if (!is_mig || !is_instance(device))
        return REAL_NVML(nvmlDeviceIsMigDeviceHandle)(device, is_mig);
    *is_mig = 0;
    return NVML_SUCCESS;
}
