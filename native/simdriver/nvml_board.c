/* The board around a card: its place, its bridges, licences, its connection, and what only root may change. */
#include <string.h>
#include <unistd.h>

#include "nvml_device.h"

#define FIRST_WITH_PLATFORM 10 /* compute capability: Blackwell */
#define FIRST_WITH_REMAPPING 8 /* Ampere remaps rows; earlier memory with ECC retires pages */
#define DISPLAY_CONTROLLER 3   /* of PCI's base classes */
#define CONTROLLER_3D 2        /* of its subclasses */

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *info) {
    uint32_t card;
    nvmlPciInfo_t pci;
    TRY(nvml_card(device, &card));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlPciInfoExt_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(nvml_pci(card, &pci));
    *info = (nvmlPciInfoExt_t){.version = info->version,
                               .domain = pci.domain,
                               .bus = pci.bus,
                               .device = pci.device,
                               .pciDeviceId = pci.pciDeviceId,
                               .pciSubSystemId = pci.pciSubSystemId,
                               .baseClass = DISPLAY_CONTROLLER,
                               .subClass = CONTROLLER_3D};
    memcpy(info->busId, pci.busId, sizeof info->busId);
    return NVML_SUCCESS;
}

/* The cards belong to the machine itself, not to a virtual one. */
NVML_GETTER(nvmlDeviceGetVirtualizationMode, nvmlGpuVirtualizationMode_t, NVML_GPU_VIRTUALIZATION_MODE_NONE)

/* Versions differ in what is written for each feature, and there is none. */
nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, nvmlGridLicensableFeatures_t *features) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!features)
        return NVML_ERROR_INVALID_ARGUMENT;
    features->isGridLicenseSupported = 0;
    features->licensableFeaturesCount = 0;
    return NVML_SUCCESS;
}
NVML_ALIAS(nvmlDeviceGetGridLicensableFeatures, nvmlGridLicensableFeatures_t, nvmlDeviceGetGridLicensableFeatures_v4)
NVML_ALIAS(nvmlDeviceGetGridLicensableFeatures_v2, nvmlGridLicensableFeatures_t, nvmlDeviceGetGridLicensableFeatures_v4)
NVML_ALIAS(nvmlDeviceGetGridLicensableFeatures_v3, nvmlGridLicensableFeatures_t, nvmlDeviceGetGridLicensableFeatures_v4)

nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, nvmlPlatformInfo_t *info) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlPlatformInfo_v1 && info->version != nvmlPlatformInfo_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (node_state->cards[card].compute_major < FIRST_WITH_PLATFORM)
        return NVML_ERROR_NOT_SUPPORTED;
    *info = (nvmlPlatformInfo_t){.version = info->version, .moduleId = (unsigned char)(card + 1)};
    return NVML_SUCCESS;
}

/* ---- the memory's health ---- */

nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, nvmlUnrepairableMemoryStatus_v1_t *status) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!status)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!node_state->faults[card].ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    status->bUnrepairableMemory = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t retiring_card(nvmlDevice_t device) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    bool retires = node_state->faults[card].ecc && node_state->cards[card].compute_major < FIRST_WITH_REMAPPING;
    return retires ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Provoked errors are counted, and retire nothing. */
nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                          unsigned long long *addresses, unsigned long long *times) {
    (void)addresses;
    (void)times;
    TRY(retiring_card(device));
    if (!count || cause >= NVML_PAGE_RETIREMENT_CAUSE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                       unsigned long long *addresses) {
    return nvmlDeviceGetRetiredPages_v2(device, cause, count, addresses, NULL);
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending) {
    TRY(retiring_card(device));
    if (!pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *pending = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

/* ---- for root ---- */

static nvmlReturn_t root_card(nvmlDevice_t device) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    return geteuid() == 0 ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

/* The limit of a simulated card is fixed: the same one may be set again. */
nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int milliwatts) {
    unsigned low, high;
    TRY(root_card(device));
    TRY(nvmlDeviceGetPowerManagementLimitConstraints(device, &low, &high));
    if (milliwatts < low || milliwatts > high)
        return NVML_ERROR_INVALID_ARGUMENT;
    return milliwatts == high ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *value) {
    if (!value)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (value->version != nvmlPowerValue_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (value->powerScope != NVML_POWER_SCOPE_GPU)
        return NVML_ERROR_NOT_SUPPORTED;
    return nvmlDeviceSetPowerManagementLimit(device, value->powerValueMw);
}

/* Looks for cards that were taken out: none is. */
nvmlReturn_t nvmlDeviceDiscoverGpus(nvmlPciInfo_t *pci) {
    TRY(nvml_ready());
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    return geteuid() == 0 ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

/* ---- the connection to the machine, which nothing uses ---- */

#define LANES 16

static unsigned generation(const struct fenka_node_card *card) {
    return card->compute_major >= 9 ? 5 : card->compute_major == 8 ? 4 : 3;
}

NVML_GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, generation(card))
NVML_ALIAS(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, nvmlDeviceGetMaxPcieLinkGeneration)
NVML_ALIAS(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, nvmlDeviceGetMaxPcieLinkGeneration)
NVML_GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, LANES)
NVML_ALIAS(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, nvmlDeviceGetMaxPcieLinkWidth)
NVML_GETTER(nvmlDeviceGetPcieReplayCounter, unsigned int, 0)

/* Kilobytes in a second. Copies take no time on a simulated card, and nothing of its connection. */
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *kilobytes) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!kilobytes || counter >= NVML_PCIE_UTIL_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *kilobytes = 0;
    return NVML_SUCCESS;
}
