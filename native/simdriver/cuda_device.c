/* Queries of devices. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "driver.h"
#include "sim_memory.h"

CUresult cuDeviceGetCount(int *count) {
    TRY(driver_ready());
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    uint32_t card;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_card(ordinal, &card));
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct mig_instance instance;
    char text[112];
    const char *shown = node_state->cards[card].name;
    if (device_instance(card, &instance)) {
        mig_device_name(text, &node_state->cards[card], &node_state->mig[card], instance);
        shown = text;
    }
    snprintf(name, (size_t)length, "%s", shown);
    return CUDA_SUCCESS;
}

/* The 16 bytes of "GPU-xxxxxxxx-xxxx-…". */
static void uuid_bytes(CUuuid *uuid, const char *text) {
    int nibbles = 0;
    memset(uuid, 0, sizeof *uuid);
    for (const char *c = text + 4; *c && nibbles < 32; c++) {
        unsigned digit;
        if (*c != '-' && sscanf(c, "%1x", &digit) == 1) {
            uuid->bytes[nibbles / 2] |= (char)(nibbles % 2 ? digit : digit << 4);
            nibbles++;
        }
    }
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    uuid_bytes(uuid, node_state->cards[card].uuid);
    return CUDA_SUCCESS;
}

/* Of an instance, where the older function returns the card's. */
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    uint32_t card;
    struct mig_instance instance;
    char text[48];
    TRY(cuDeviceGetUuid(uuid, device));
    TRY(device_card(device, &card));
    if (device_instance(card, &instance)) {
        mig_uuid(text, &node_state->cards[card], &node_state->mig[card], instance);
        uuid_bytes(uuid, text);
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = sim_memory_size(card, sim_memory_mark(card));
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = (int)node_state->cards[card].compute_major;
    *minor = (int)node_state->cards[card].compute_minor;
    return CUDA_SUCCESS;
}

/* "00000000:17:00.0" -> domain, bus, device. */
static int pci_number(const struct fenka_node_card *card, int which) {
    unsigned numbers[3] = {0};
    sscanf(card->pci_bus_id, "%x:%x:%x", &numbers[0], &numbers[1], &numbers[2]);
    return (int)numbers[which];
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!text || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fenka_node_card *held = &node_state->cards[card];
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", pci_number(held, 0), pci_number(held, 1), pci_number(held, 2));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    TRY(driver_ready());
    if (!device || !text)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned domain = 0, bus = 0, slot = 0;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3 && (domain = 0, sscanf(text, "%x:%x", &bus, &slot)) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (int ordinal = 0; ordinal < device_count; ordinal++) {
        const struct fenka_node_card *card = &node_state->cards[device_cards[ordinal]];
        if (pci_number(card, 0) == (int)domain && pci_number(card, 1) == (int)bus && pci_number(card, 2) == (int)slot) {
            *device = ordinal;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

/* Attributes that are equal on all cards; others are 0, which means "not supported". */
static const int common[CU_DEVICE_ATTRIBUTE_MAX] = {
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z] = 64,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X] = 2147483647,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y] = 65535,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z] = 65535,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] = 49152,
    [CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY] = 65536,
    [CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32,
    [CU_DEVICE_ATTRIBUTE_MAX_PITCH] = 2147483647,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK] = 65536,
    [CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT] = 512,
    [CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT] = 32,
    [CU_DEVICE_ATTRIBUTE_GPU_OVERLAP] = 1,
    [CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 1,
    [CU_DEVICE_ATTRIBUTE_COMPUTE_MODE] = CU_COMPUTEMODE_DEFAULT,
    [CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS] = 1,
    [CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT] = 3,
    [CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1,
    [CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH] = 256,
    [CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 4194304,
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR] = 16,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] = 65536,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = 65536,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR] = 65536,
    [CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1,
    [CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] = 1,
    [CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM] = 1,
    [CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1,
    [CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK] = 0,
};

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    uint32_t index;
    TRY(device_card(device, &index));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fenka_node_card *card = &node_state->cards[index];
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = (int)device_multiprocessors(index);
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = (int)card->compute_major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = (int)card->compute_minor;
        break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED:
        *value = card->compute_major >= 9;
        break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        *value = (int)card->max_sm_clock_mhz * 1000;
        break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        *value = (int)card->max_memory_clock_mhz * 1000;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        *value = pci_number(card, 0);
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = pci_number(card, 1);
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        *value = pci_number(card, 2);
        break;
    default:
        *value = (int)attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX ? common[attribute] : 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    *properties = (CUdevprop){
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .sharedMemPerBlock = 49152,
        .totalConstantMemory = 65536,
        .SIMDWidth = 32,
        .memPitch = 2147483647,
        .regsPerBlock = 65536,
        .clockRate = (int)node_state->cards[card].max_sm_clock_mhz * 1000,
        .textureAlign = 512,
    };
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    uint32_t card, other;
    struct mig_instance instance;
    TRY(device_card(device, &card));
    TRY(device_card(peer, &other));
    bool divided = device_instance(card, &instance) || device_instance(other, &instance);
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    /* All simulated memory is the host's, but instances are walls. */
    *can = device != peer && !divided;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer) {
    uint32_t card;
    TRY(device_card(device, &card));
    TRY(device_card(peer, &card));
    if (!value || device == peer)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device) {
    uint32_t card;
    (void)type;
    TRY(device_card(device, &card));
    if (!supported)
        return CUDA_ERROR_INVALID_VALUE;
    *supported = 0;
    return CUDA_SUCCESS;
}
