/* A card's current readings. */
#include "sim_memory.h"
#include "nvml_device.h"
#include "timeline.h"

#include <stdlib.h>

#define FIRST_WITH_RESERVE 510 /* the first driver that reports its reserve */
#define IDLE_C 30
#define BUSY_C 75
#define IDLE_CLOCK_MHZ 300

/* 0 to 1000 thousandths of the last second. */
static uint32_t load_of(uint32_t card) { return (uint32_t)(timeline_card_busy(card) / 1000000); }

static uint32_t between(uint32_t low, uint32_t high, uint32_t thousandths) {
    return high <= low ? low : low + (uint32_t)((uint64_t)(high - low) * thousandths / 1000);
}

/* total = reserved + used + free. An instance has no reserve of its own. */
static nvmlReturn_t memory_of(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    const struct fenka_node_card *card = &node_state->cards[target.card];
    if (card->unified)
        return NVML_ERROR_NOT_SUPPORTED;
    uint32_t mark = target.mig ? mig_mark(target.instance) : 0;
    uint64_t size = sim_memory_size(target.card, mark), used = sim_memory_used(target.card, mark);
    memory->reserved = mark ? 0 : card->reserved_bytes;
    memory->total = size + memory->reserved;
    memory->used = used > size ? size : used; /* a charge that is about to be refunded */
    memory->free = size - memory->used;
    return NVML_SUCCESS;
}

/* The first version counts the reserve as used, as the driver does. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t all;
    TRY(nvml_ready());
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(memory_of(device, &all));
    memory->total = all.total;
    memory->used = all.used + all.reserved;
    memory->free = all.free;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    TRY(nvml_ready());
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (atoi(node_state->driver_version) < FIRST_WITH_RESERVE)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    return memory_of(device, memory);
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    memory->bar1Total = 256 << 20;
    memory->bar1Used = 2 << 20;
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (node_state->mig[card].enabled)
        return NVML_ERROR_NOT_SUPPORTED; /* of instances nothing is measured */
    if (!utilization)
        return NVML_ERROR_INVALID_ARGUMENT;
    utilization->gpu = (load_of(card) + 5) / 10;
    utilization->memory = utilization->gpu / 2; /* kernels use half of the memory's bandwidth */
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!celsius || sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_faults *faults = &node_state->faults[card];
    *celsius = __atomic_load_n(&faults->hot, __ATOMIC_ACQUIRE) ? (unsigned)faults->temperature_c
                                                               : between(IDLE_C, BUSY_C, load_of(card));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    unsigned celsius;
    if (!temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(nvmlDeviceGetTemperature(device, temperature->sensorType, &celsius));
    temperature->temperature = (int)celsius;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                               unsigned int *celsius) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!celsius)
        return NVML_ERROR_INVALID_ARGUMENT;
    switch (threshold) {
    case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN:
        *celsius = 96;
        break;
    case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
        *celsius = 93;
        break;
    case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
        *celsius = 85;
        break;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetPowerUsage, unsigned int, between(card->idle_power_mw, card->power_limit_mw, load_of(index)))
NVML_GETTER(nvmlDeviceGetPowerManagementLimit, unsigned int, card->power_limit_mw)
NVML_ALIAS(nvmlDeviceGetEnforcedPowerLimit, unsigned int, nvmlDeviceGetPowerManagementLimit)
NVML_ALIAS(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, nvmlDeviceGetPowerManagementLimit)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *low, unsigned int *high) {
    if (!low)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvmlDeviceGetPowerManagementLimit(device, high));
    *low = *high / 2;
    return NVML_SUCCESS;
}

/* 64 in each multiprocessor of an A100, 128 in later ones. */
NVML_GETTER(nvmlDeviceGetNumGpuCores, unsigned int,
            card->sm_count *(card->compute_major == 8 && card->compute_minor == 0 ? 64 : 128))

NVML_GETTER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!mhz || type >= NVML_CLOCK_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_card *held = &node_state->cards[card];
    *mhz = type == NVML_CLOCK_MEM ? held->max_memory_clock_mhz : held->max_sm_clock_mhz;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    uint32_t card;
    TRY(nvmlDeviceGetMaxClockInfo(device, type, mhz));
    TRY(nvml_card(device, &card));
    if (load_of(card) == 0)
        *mhz = type == NVML_CLOCK_MEM ? *mhz / 10 : IDLE_CLOCK_MHZ;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    return nvmlDeviceGetMaxClockInfo(device, type, mhz);
}

NVML_GETTER(nvmlDeviceGetPerformanceState, nvmlPstates_t, load_of(index) > 0 ? NVML_PSTATE_0 : NVML_PSTATE_8)
NVML_ALIAS(nvmlDeviceGetPowerState, nvmlPstates_t, nvmlDeviceGetPerformanceState)
NVML_GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long,
            load_of(index) > 0 ? nvmlClocksThrottleReasonNone : nvmlClocksThrottleReasonGpuIdle)
NVML_ALIAS(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, nvmlDeviceGetCurrentClocksThrottleReasons)
NVML_GETTER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, nvmlClocksThrottleReasonGpuIdle)
NVML_ALIAS(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, nvmlDeviceGetSupportedClocksEventReasons)

nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *percent) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!percent)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (node_state->cards[card].fan_percent == 0)
        return NVML_ERROR_NOT_SUPPORTED; /* cooled by the chassis */
    *percent = between(node_state->cards[card].fan_percent, 100, load_of(card));
    return NVML_SUCCESS;
}

NVML_ALIAS(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, nvmlDeviceGetPowerManagementMode)
NVML_GETTER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, NVML_FEATURE_DISABLED)
NVML_ALIAS(nvmlDeviceGetDisplayMode, nvmlEnableState_t, nvmlDeviceGetDisplayActive)
NVML_GETTER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
