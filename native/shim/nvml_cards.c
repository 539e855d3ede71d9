#include "nvml_cards.h"

#include <string.h>

#include "control.h"
#include "lease.h"

int nvml_card(nvmlDevice_t device) {
    char uuid[96];
    if (REAL_NVML(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != NVML_SUCCESS || strlen(uuid) < 40)
        return -1;
    return control_find_card(uuid + 4);
}

nvmlReturn_t nvml_handle_by_index(unsigned int card, nvmlDevice_t *device) {
    if (!lease_ready())
        return NVML_LEASE_BROKEN;
    if (card >= control_cards())
        return NVML_ERROR_INVALID_ARGUMENT;
    return REAL_NVML(nvmlDeviceGetHandleByUUID)(control_uuid(card), device);
}
