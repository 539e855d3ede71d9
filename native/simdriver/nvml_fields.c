/* Many values by one call. Fields that are not listed here are not supported. */
#include <time.h>

#include "nvml_device.h"

static nvmlReturn_t number(nvmlFieldValue_t *field, nvmlReturn_t result, unsigned value) {
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.uiVal = value;
    return result;
}

static nvmlReturn_t long_number(nvmlFieldValue_t *field, nvmlReturn_t result, unsigned long long value) {
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = value;
    return result;
}

static nvmlReturn_t ecc_mode(nvmlDevice_t device, nvmlFieldValue_t *field) {
    nvmlEnableState_t current = NVML_FEATURE_DISABLED, pending;
    nvmlReturn_t result = nvmlDeviceGetEccMode(device, &current, &pending);
    return number(field, result, current == NVML_FEATURE_ENABLED);
}

static nvmlReturn_t ecc_errors(nvmlDevice_t device, nvmlFieldValue_t *field) {
    unsigned long long count = 0;
    bool corrected = field->fieldId == NVML_FI_DEV_ECC_SBE_VOL_TOTAL || field->fieldId == NVML_FI_DEV_ECC_SBE_AGG_TOTAL;
    nvmlReturn_t result = nvmlDeviceGetTotalEccErrors(
        device, corrected ? NVML_MEMORY_ERROR_TYPE_CORRECTED : NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        field->fieldId < NVML_FI_DEV_ECC_SBE_AGG_TOTAL ? NVML_VOLATILE_ECC : NVML_AGGREGATE_ECC, &count);
    return long_number(field, result, count);
}

static nvmlReturn_t power(nvmlDevice_t device, nvmlFieldValue_t *field) {
    unsigned low = 0, high = 0;
    nvmlReturn_t result = nvmlDeviceGetPowerManagementLimitConstraints(device, &low, &high);
    return number(field, result, field->fieldId == NVML_FI_DEV_POWER_MIN_LIMIT ? low : high);
}

static nvmlReturn_t answer(nvmlDevice_t device, nvmlFieldValue_t *field) {
    uint32_t card;
    unsigned milliwatts = 0;
    unsigned long long energy = 0;
    nvmlReturn_t result = nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    switch (field->fieldId) {
    case NVML_FI_DEV_ECC_CURRENT:
    case NVML_FI_DEV_ECC_PENDING:
        return ecc_mode(device, field);
    case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
    case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
        return ecc_errors(device, field);
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        return number(field, NVML_SUCCESS, nvml_link_count(card));
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        result = nvmlDeviceGetTotalEnergyConsumption(device, &energy);
        return long_number(field, result, energy);
    case NVML_FI_DEV_PCIE_COUNT_TX_BYTES:
    case NVML_FI_DEV_PCIE_COUNT_RX_BYTES:
        return long_number(field, NVML_SUCCESS, 0);
    case NVML_FI_DEV_PCIE_REPLAY_COUNTER:
        return number(field, NVML_SUCCESS, 0);
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT:
        result = nvmlDeviceGetPowerUsage(device, &milliwatts);
        return number(field, result, milliwatts);
    case NVML_FI_DEV_POWER_MIN_LIMIT:
    case NVML_FI_DEV_POWER_MAX_LIMIT:
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        return power(device, field);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

static nvmlReturn_t for_each(nvmlDevice_t device, int count, nvmlFieldValue_t *fields,
                             nvmlReturn_t (*act)(nvmlDevice_t, nvmlFieldValue_t *)) {
    struct timespec now;
    uint32_t card;
    nvmlReturn_t found = nvml_card(device, &card);
    if (found != NVML_SUCCESS && found != NVML_ERROR_NOT_SUPPORTED) /* each field of an instance is refused */
        return found;
    if (count < 0 || (count > 0 && !fields))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        clock_gettime(CLOCK_REALTIME, &now);
        fields[i].timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
        fields[i].latencyUsec = 0;
        fields[i].nvmlReturn = act(device, &fields[i]);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields) {
    return for_each(device, count, fields, answer);
}

/* The only counter that may be reset is always 0. */
static nvmlReturn_t reset(nvmlDevice_t device, nvmlFieldValue_t *field) {
    (void)device;
    return field->fieldId == NVML_FI_DEV_PCIE_REPLAY_COUNTER ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields) {
    return for_each(device, count, fields, reset);
}
