/* How the cards are connected with each other and with the CPUs, by the node's topology. */
#include "nvml_device.h"

#include <stdio.h>
#include <string.h>

#define SWITCHES 6
#define BRIDGE_LINKS 4
#define WORD_BITS (8 * sizeof(unsigned long))

/* Two sockets have half of the cards each, and two neighbours of a socket are a pair. */
static uint32_t first_of_second(void) { return (node_state->card_count + 1) / 2; }

static uint32_t socket_of(uint32_t card) {
    return node_state->topology != FENKA_NODE_FLAT && card >= first_of_second();
}

static uint32_t pair_of(uint32_t card) {
    uint32_t first = socket_of(card) ? first_of_second() : 0;
    return first + (card - first) / 2 * 2;
}

static nvmlGpuTopologyLevel_t level(uint32_t one, uint32_t other) {
    if (one == other)
        return NVML_TOPOLOGY_INTERNAL;
    if (node_state->topology == FENKA_NODE_FLAT)
        return NVML_TOPOLOGY_HOSTBRIDGE;
    if (socket_of(one) != socket_of(other))
        return NVML_TOPOLOGY_SYSTEM;
    if (node_state->topology == FENKA_NODE_BRIDGES)
        return NVML_TOPOLOGY_HOSTBRIDGE;
    return pair_of(one) == pair_of(other) ? NVML_TOPOLOGY_SINGLE : NVML_TOPOLOGY_NODE;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuTopologyLevel_t *found) {
    uint32_t first, second;
    TRY(nvml_card(one, &first));
    TRY(nvml_card(other, &second));
    if (!found)
        return NVML_ERROR_INVALID_ARGUMENT;
    *found = level(first, second);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t wanted, unsigned int *count,
                                              nvmlDevice_t *near) {
    uint32_t card, found = 0;
    TRY(nvml_card(device, &card));
    if (!count || (*count > 0 && !near))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t other = 0; other < node_state->card_count; other++)
        if (other != card && level(card, other) == wanted) {
            if (found < *count)
                near[found] = nvml_handle(other);
            found++;
        }
    *count = found;
    return NVML_SUCCESS;
}

/* ---- NVLink ---- */

static uint32_t partner_of(uint32_t card) {
    uint32_t pair = pair_of(card);
    return card == pair ? pair + 1 : pair;
}

/* How many links of the card are connected. */
uint32_t nvml_link_count(uint32_t card) {
    if (node_state->topology == FENKA_NODE_NVSWITCH)
        return node_state->cards[card].compute_major >= 9 ? 18 : node_state->cards[card].compute_major == 8 ? 12 : 6;
    bool paired = node_state->topology == FENKA_NODE_BRIDGES && partner_of(card) < node_state->card_count &&
                  socket_of(partner_of(card)) == socket_of(card);
    return paired ? BRIDGE_LINKS : 0;
}

/* Links that a card has and that lead nowhere are inactive. */
static nvmlReturn_t connected(nvmlDevice_t device, unsigned int link, uint32_t *card, bool *active) {
    TRY(nvml_card(device, card));
    if (node_state->topology != FENKA_NODE_NVSWITCH && node_state->topology != FENKA_NODE_BRIDGES)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link >= NVML_NVLINK_MAX_LINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    *active = link < nvml_link_count(*card);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state) {
    uint32_t card;
    bool active;
    TRY(connected(device, link, &card, &active));
    if (!state)
        return NVML_ERROR_INVALID_ARGUMENT;
    *state = active ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type) {
    uint32_t card;
    bool active;
    TRY(connected(device, link, &card, &active));
    if (!type || !active)
        return NVML_ERROR_INVALID_ARGUMENT;
    *type = node_state->topology == FENKA_NODE_NVSWITCH ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    uint32_t card;
    bool active;
    TRY(connected(device, link, &card, &active));
    if (!pci || !active)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (node_state->topology == FENKA_NODE_BRIDGES)
        return nvml_pci(partner_of(card), pci);
    memset(pci, 0, sizeof *pci);
    pci->bus = 0xc0 + link % SWITCHES;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", 0u, pci->bus, 0u);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", 0u, pci->bus, 0u);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

static bool linked(uint32_t one, uint32_t other) {
    if (node_state->topology == FENKA_NODE_NVSWITCH)
        return true;
    return nvml_link_count(one) > 0 && partner_of(one) == other;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, nvmlNvLinkCapability_t capability,
                                           unsigned int *value) {
    uint32_t card;
    bool active;
    TRY(connected(device, link, &card, &active));
    if (!value || (unsigned)capability >= NVML_NVLINK_CAP_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool peers = capability == NVML_NVLINK_CAP_P2P_SUPPORTED || capability == NVML_NVLINK_CAP_P2P_ATOMICS;
    *value = active && (peers || capability == NVML_NVLINK_CAP_VALID);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuP2PCapsIndex_t what,
                                    nvmlGpuP2PStatus_t *status) {
    uint32_t first, second;
    TRY(nvml_card(one, &first));
    TRY(nvml_card(other, &second));
    if (!status || first == second || (unsigned)what > NVML_P2P_CAPS_INDEX_UNKNOWN)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (what == NVML_P2P_CAPS_INDEX_UNKNOWN) {
        *status = NVML_P2P_STATUS_UNKNOWN;
        return NVML_SUCCESS;
    }
    bool by_link = what == NVML_P2P_CAPS_INDEX_NVLINK || what == NVML_P2P_CAPS_INDEX_ATOMICS;
    *status = !by_link || linked(first, second) ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

/* ---- the CPUs ---- */

static void set_bits(unsigned long *set, unsigned int words, uint32_t from, uint32_t to) {
    for (uint32_t bit = from; bit < to && bit < words * WORD_BITS; bit++)
        set[bit / WORD_BITS] |= 1UL << bit % WORD_BITS;
}

/* Without a topology all CPUs are near. Each of two sockets has half of them; one CPU belongs to both. */
static void cpus_of(uint32_t card, uint32_t *from, uint32_t *to) {
    uint32_t cpus = node_state->cpus;
    *from = socket_of(card) ? cpus / 2 : 0;
    *to = socket_of(card) || node_state->topology == FENKA_NODE_FLAT ? cpus : (cpus + 1) / 2;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set) {
    uint32_t card, from, to;
    TRY(nvml_card(device, &card));
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(set, 0, words * sizeof *set);
    cpus_of(card, &from, &to);
    set_bits(set, words, from, to);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *near) {
    uint32_t found = 0, from, to;
    TRY(nvml_ready());
    if (!count || cpu >= node_state->cpus || (*count > 0 && !near))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t card = 0; card < node_state->card_count; card++) {
        cpus_of(card, &from, &to);
        if (cpu < from || cpu >= to)
            continue;
        if (found < *count)
            near[found] = nvml_handle(card);
        found++;
    }
    *count = found;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int words, unsigned long *set,
                                                 nvmlAffinityScope_t scope) {
    if (scope != NVML_AFFINITY_SCOPE_NODE && scope != NVML_AFFINITY_SCOPE_SOCKET)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetCpuAffinity(device, words, set);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set,
                                         nvmlAffinityScope_t scope) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!set || words == 0 || (scope != NVML_AFFINITY_SCOPE_NODE && scope != NVML_AFFINITY_SCOPE_SOCKET))
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(set, 0, words * sizeof *set);
    set_bits(set, words, socket_of(card), socket_of(card) + 1);
    return NVML_SUCCESS;
}
