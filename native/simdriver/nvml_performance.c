/* Performance states, clocks as text, fans and energy. All cards have the states P0 and P8. */
#include <stdio.h>
#include <string.h>

#include "nvml_device.h"

#define STATES 2
#define IDLE_DIVISOR 10 /* of the memory clock, as nvmlDeviceGetClockInfo has it */
#define IDLE_CLOCK_MHZ 300

static const nvmlPstates_t states[STATES] = {NVML_PSTATE_0, NVML_PSTATE_8};

static void clocks_of(const struct fenka_node_card *card, nvmlPstates_t state, unsigned *sm, unsigned *memory) {
    *sm = state == NVML_PSTATE_0 ? card->max_sm_clock_mhz : IDLE_CLOCK_MHZ;
    *memory = state == NVML_PSTATE_0 ? card->max_memory_clock_mhz : card->max_memory_clock_mhz / IDLE_DIVISOR;
}

nvmlReturn_t nvmlDeviceGetSupportedPerformanceStates(nvmlDevice_t device, nvmlPstates_t *list, unsigned int bytes) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!list)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (bytes < sizeof states)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < bytes / sizeof *list; i++)
        list[i] = i < STATES ? states[i] : NVML_PSTATE_UNKNOWN;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinMaxClockOfPState(nvmlDevice_t device, nvmlClockType_t type, nvmlPstates_t state,
                                              unsigned int *low, unsigned int *high) {
    uint32_t card;
    unsigned sm, memory;
    TRY(nvml_card(device, &card));
    if (!low || !high || type >= NVML_CLOCK_COUNT || (state != states[0] && state != states[1]))
        return NVML_ERROR_INVALID_ARGUMENT;
    clocks_of(&node_state->cards[card], state, &sm, &memory);
    *high = type == NVML_CLOCK_MEM ? memory : sm;
    *low = type == NVML_CLOCK_MEM ? memory : IDLE_CLOCK_MHZ;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t which, unsigned int *mhz) {
    switch (which) {
    case NVML_CLOCK_ID_CURRENT:
        return nvmlDeviceGetClockInfo(device, type, mhz);
    case NVML_CLOCK_ID_APP_CLOCK_TARGET:
    case NVML_CLOCK_ID_APP_CLOCK_DEFAULT:
        return nvmlDeviceGetApplicationsClock(device, type, mhz);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info) {
    nvmlUtilization_t load;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvmlDeviceGetUtilizationRates(device, &load));
    memset(info, 0, sizeof *info);
    info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].bIsPresent = 1;
    info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].percentage = load.gpu;
    info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].bIsPresent = 1;
    info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].percentage = load.memory;
    return NVML_SUCCESS;
}

/* One level as nvml.h writes it; the memory transfers twice in a clock. */
static int level_text(char *text, size_t room, unsigned sm, unsigned memory) {
    return snprintf(text, room,
                    "nvclock=%u, nvclockmin=%u, nvclockmax=%u, nvclockeditable=0, memclock=%u, "
                    "memclockmin=%u, memclockmax=%u, memclockeditable=0, memtransferrate=%u, memtransferratemin=%u, "
                    "memtransferratemax=%u, memtransferrateeditable=0",
                    sm, IDLE_CLOCK_MHZ, sm, memory, memory, memory, 2 * memory, 2 * memory, 2 * memory);
}

nvmlReturn_t nvmlDeviceGetPerformanceModes(nvmlDevice_t device, nvmlDevicePerfModes_t *modes) {
    uint32_t card;
    unsigned sm, memory;
    TRY(nvml_card(device, &card));
    if (!modes)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (modes->version != nvmlDevicePerfModes_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    size_t at = 0;
    for (unsigned i = STATES; i-- > 0;) { /* the slowest level is the first */
        clocks_of(&node_state->cards[card], states[i], &sm, &memory);
        at += (size_t)snprintf(modes->str + at, sizeof modes->str - at, "perf=%u, ", STATES - 1 - i);
        at += (size_t)level_text(modes->str + at, sizeof modes->str - at, sm, memory);
        if (i > 0)
            at += (size_t)snprintf(modes->str + at, sizeof modes->str - at, " ; ");
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClockFreqs(nvmlDevice_t device, nvmlDeviceCurrentClockFreqs_t *clocks) {
    unsigned sm, memory;
    if (!clocks)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (clocks->version != nvmlDeviceCurrentClockFreqs_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(nvmlDeviceGetClockInfo(device, NVML_CLOCK_SM, &sm));
    TRY(nvmlDeviceGetClockInfo(device, NVML_CLOCK_MEM, &memory));
    level_text(clocks->str, sizeof clocks->str, sm, memory);
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetNumFans, unsigned int, card->fan_percent > 0)

nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan, unsigned int *percent) {
    unsigned fans;
    TRY(nvmlDeviceGetNumFans(device, &fans));
    if (fans > 0 && fan >= fans)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetFanSpeed(device, percent);
}

/* Millijoules since the machine was started, of an idle card. */
NVML_GETTER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long,
            (unsigned long long)(node_now() / 1000000) * card->idle_power_mw / 1000)
