/* Handles of cards, and their fixed properties. */
#include "nvml_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static nvmlReturn_t give(nvmlDevice_t *device, uint32_t card) {
    if (node_card_lost(card))
        return NVML_ERROR_GPU_IS_LOST;
    *device = nvml_handle(card);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    TRY(nvml_ready());
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = node_state->card_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    TRY(nvml_ready());
    if (!device || index >= node_state->card_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return give(device, index);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    TRY(nvml_ready());
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t card = 0; card < node_state->card_count; card++) {
        const char *known = node_state->cards[card].uuid; /* "GPU-…"; the digits alone name it, too */
        if (strcasecmp(known, uuid) == 0 || strcasecmp(known + strlen("GPU-"), uuid) == 0)
            return give(device, card);
    }
    return nvml_mig_by_uuid(uuid, device) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* The digits of a text as bytes. */
static void uuid_bytes(const char *text, unsigned char bytes[NVML_DEVICE_UUID_BINARY_LEN]) {
    unsigned nibbles = 0, digit;
    memset(bytes, 0, NVML_DEVICE_UUID_BINARY_LEN);
    for (; *text && nibbles < 2 * NVML_DEVICE_UUID_BINARY_LEN; text++)
        if (*text != '-' && sscanf(text, "%1x", &digit) == 1) {
            bytes[nibbles / 2] |= (unsigned char)(nibbles % 2 ? digit : digit << 4);
            nibbles++;
        }
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device) {
    unsigned char bytes[NVML_DEVICE_UUID_BINARY_LEN];
    char text[NVML_DEVICE_UUID_ASCII_LEN + 1];
    TRY(nvml_ready());
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (uuid->version != nvmlUUID_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (uuid->type == NVML_UUID_TYPE_ASCII) {
        snprintf(text, sizeof text, "%.*s", NVML_DEVICE_UUID_ASCII_LEN, uuid->value.str);
        return nvmlDeviceGetHandleByUUID(text, device);
    }
    if (uuid->type != NVML_UUID_TYPE_BINARY)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t card = 0; card < node_state->card_count; card++) {
        uuid_bytes(node_state->cards[card].uuid + strlen("GPU-"), bytes);
        if (memcmp(bytes, uuid->value.bytes, sizeof bytes) == 0)
            return give(device, card);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* The cards' places on the board that carries them. */
NVML_GETTER(nvmlDeviceGetModuleId, unsigned int, index)

/* No card shares its memory with the host's. */
nvmlReturn_t nvmlDeviceGetCapabilities(nvmlDevice_t device, nvmlDeviceCapabilities_t *capabilities) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!capabilities)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (capabilities->version != nvmlDeviceCapabilities_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    capabilities->capMask = 0;
    return NVML_SUCCESS;
}

/* Chassis of S-class systems, which are not made any more. */
nvmlReturn_t nvmlUnitGetCount(unsigned int *count) {
    TRY(nvml_ready());
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

/* A number of the card's own, as of its factory: here the first digits of its UUID. */
nvmlReturn_t nvmlDeviceGetPdi(nvmlDevice_t device, nvmlPdi_t *pdi) {
    uint32_t card;
    unsigned char bytes[NVML_DEVICE_UUID_BINARY_LEN];
    TRY(nvml_card(device, &card));
    if (!pdi)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (pdi->version != nvmlPdi_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uuid_bytes(node_state->cards[card].uuid + strlen("GPU-"), bytes);
    memcpy(&pdi->value, bytes, sizeof pdi->value);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    TRY(nvml_ready());
    if (!serial || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t card = 0; card < node_state->card_count; card++)
        if (strcmp(node_state->cards[card].serial, serial) == 0)
            return give(device, card);
    return NVML_ERROR_NOT_FOUND;
}

static bool parse_pci(const char *text, unsigned numbers[3]) {
    numbers[0] = 0;
    return sscanf(text, "%x:%x:%x", &numbers[0], &numbers[1], &numbers[2]) == 3 ||
           (numbers[0] = 0, sscanf(text, "%x:%x", &numbers[1], &numbers[2])) == 2;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    unsigned wanted[3], found[3];
    TRY(nvml_ready());
    if (!bus_id || !device || !parse_pci(bus_id, wanted))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t card = 0; card < node_state->card_count; card++)
        if (parse_pci(node_state->cards[card].pci_bus_id, found) && memcmp(wanted, found, sizeof wanted) == 0)
            return give(device, card);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

NVML_GETTER(nvmlDeviceGetMinorNumber, unsigned int, index)

/* Of an instance: its position among those of the card. */
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    struct nvml_target target;
    struct mig_instance found;
    TRY(nvml_target(device, &target));
    if (!index)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool within = target.mig && !target.of_compute;
    *index = within ? 0 : target.card;
    while (within && mig_instance_at(&node_state->mig[target.card], *index, &found) &&
           memcmp(&found, &target.instance, sizeof found) != 0)
        ++*index;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    struct nvml_target target;
    char text[112];
    TRY(nvml_target(device, &target));
    const struct fenka_node_card *card = &node_state->cards[target.card];
    if (!target.mig)
        return nvml_text(name, length, card->name);
    mig_device_name(text, card, &node_state->mig[target.card], target.instance);
    return nvml_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    struct nvml_target target;
    char text[48];
    TRY(nvml_target(device, &target));
    const struct fenka_node_card *card = &node_state->cards[target.card];
    if (!target.mig)
        return nvml_text(uuid, length, card->uuid);
    mig_uuid(text, card, &node_state->mig[target.card], target.instance);
    return nvml_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    return nvml_text(serial, length, node_state->cards[card].serial);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    return pci ? nvml_pci(card, pci) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvml_pci(uint32_t card, nvmlPciInfo_t *pci) {
    unsigned numbers[3];
    if (!parse_pci(node_state->cards[card].pci_bus_id, numbers))
        return NVML_ERROR_UNKNOWN;
    memset(pci, 0, sizeof *pci);
    pci->domain = numbers[0];
    pci->bus = numbers[1];
    pci->device = numbers[2];
    pci->pciDeviceId = node_state->mig[card].pci_device << 16 | 0x10de; /* vendor NVIDIA */
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", numbers[0], numbers[1], numbers[2]);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", numbers[0], numbers[1], numbers[2]);
    return NVML_SUCCESS;
}

NVML_ALIAS(nvmlDeviceGetPciInfo_v2, nvmlPciInfo_t, nvmlDeviceGetPciInfo_v3)
NVML_ALIAS(nvmlDeviceGetPciInfo, nvmlPciInfo_t, nvmlDeviceGetPciInfo_v3)

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)node_state->cards[card].compute_major;
    *minor = (int)node_state->cards[card].compute_minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture) {
    static const struct {
        uint32_t capability, architecture;
    } table[] = {{100, NVML_DEVICE_ARCH_BLACKWELL}, {90, NVML_DEVICE_ARCH_HOPPER}, {89, NVML_DEVICE_ARCH_ADA},
                 {80, NVML_DEVICE_ARCH_AMPERE},     {75, NVML_DEVICE_ARCH_TURING}, {70, NVML_DEVICE_ARCH_VOLTA},
                 {60, NVML_DEVICE_ARCH_PASCAL}};
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!architecture)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_card *held = &node_state->cards[card];
    uint32_t capability = held->compute_major * 10 + held->compute_minor;
    *architecture = NVML_DEVICE_ARCH_UNKNOWN;
    for (size_t i = sizeof table / sizeof *table; i-- > 0;)
        if (capability >= table[i].capability)
            *architecture = table[i].architecture;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!brand)
        return NVML_ERROR_INVALID_ARGUMENT;
    const char *name = node_state->cards[card].name;
    *brand = strstr(name, "GeForce") ? NVML_BRAND_GEFORCE
             : strstr(name, "Tesla") ? NVML_BRAND_TESLA
                                     : NVML_BRAND_NVIDIA;
    return NVML_SUCCESS;
}
