/* GPU instances: profiles, places, creation and destruction. */
#include <stdio.h>
#include <string.h>

#include "nvml_mig.h"

static nvmlReturn_t profile_of(nvmlDevice_t device, unsigned kind, uint32_t *card,
                               const struct fenka_node_mig_profile **profile) {
    TRY(nvml_mig_card(device, card));
    if (kind >= NVML_GPU_INSTANCE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *profile = mig_profile_by_kind(&node_state->mig[*card], kind);
    return *profile ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Versions differ in what stands before and after these fields. */
#define FILL(info, profile)                                \
    do {                                                   \
        (info)->id = (profile)->id;                        \
        (info)->sliceCount = (profile)->slices;            \
        (info)->instanceCount = (profile)->limit;          \
        (info)->multiprocessorCount = (profile)->sm_count; \
        (info)->copyEngineCount = (profile)->engines[0];   \
        (info)->decoderCount = (profile)->engines[1];      \
        (info)->encoderCount = (profile)->engines[2];      \
        (info)->jpegCount = (profile)->engines[3];         \
        (info)->ofaCount = (profile)->engines[4];          \
        (info)->memorySizeMB = (profile)->memory_mib;      \
    } while (0)

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int kind,
                                                 nvmlGpuInstanceProfileInfo_t *info) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    TRY(profile_of(device, kind, &card, &profile));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    info->isP2pSupported = 0;
    FILL(info, profile);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int kind,
                                                  nvmlGpuInstanceProfileInfo_v2_t *info) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlGpuInstanceProfileInfo_v2 && info->version != nvmlGpuInstanceProfileInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(profile_of(device, kind, &card, &profile));
    if (info->version == nvmlGpuInstanceProfileInfo_v2) {
        info->isP2pSupported = 0;
        FILL(info, profile);
        snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
        return NVML_SUCCESS;
    }
    nvmlGpuInstanceProfileInfo_v3_t *newer = (void *)info;
    FILL(newer, profile);
    snprintf(newer->name, sizeof newer->name, "MIG %s", profile->name);
    newer->capabilities = strstr(profile->name, "+gfx") ? NVML_GPU_INSTANCE_PROFILE_CAPS_GFX : 0;
    return NVML_SUCCESS;
}

/* By nvidia-smi's number. */
static nvmlReturn_t by_id(uint32_t card, unsigned id, const struct fenka_node_mig_profile **profile) {
    *profile = mig_profile_by_id(&node_state->mig[card], id);
    return *profile ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                           nvmlGpuInstancePlacement_t *placements,
                                                           unsigned int *count) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    TRY(nvml_mig_card(device, &card));
    TRY(by_id(card, id, &profile));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = profile->start_count;
    for (unsigned i = 0; placements && i < *count; i++)
        placements[i] = (nvmlGpuInstancePlacement_t){profile->starts[i], profile->size};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int id,
                                                        nvmlGpuInstancePlacement_t *placements, unsigned int *count) {
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    TRY(nvml_mig_enabled(device, &card));
    TRY(by_id(card, id, &profile));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = mig_room(&node_state->mig[card], profile);
    return NVML_SUCCESS;
}

/* start: plus 1; 0 = the driver chooses. */
static nvmlReturn_t create(nvmlDevice_t device, unsigned id, unsigned start, nvmlGpuInstance_t *gpu) {
    uint32_t card, made;
    const struct fenka_node_mig_profile *profile;
    TRY(nvml_mig_enabled(device, &card));
    TRY(by_id(card, id, &profile));
    if (!gpu)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvml_mig_run(FENKA_NODE_MIG_CREATE_GI, card, id | (int64_t)start << 8, &made));
    *gpu = nvml_gpu_handle(card, made);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *gpu) {
    return create(device, id, 0, gpu);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id,
                                                      const nvmlGpuInstancePlacement_t *placement,
                                                      nvmlGpuInstance_t *gpu) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    TRY(nvml_mig_enabled(device, &card));
    TRY(by_id(card, id, &profile));
    if (!placement || placement->size != profile->size || !mig_has_start(profile, placement->start))
        return NVML_ERROR_INVALID_ARGUMENT;
    return create(device, id, placement->start + 1, gpu);
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t handle) {
    uint32_t card, gpu;
    TRY(nvml_gpu_instance(handle, &card, &gpu));
    return nvml_mig_run(FENKA_NODE_MIG_DESTROY_GI, card, gpu, NULL);
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances,
                                       unsigned int *count) {
    uint32_t card;
    const struct fenka_node_mig_profile *profile;
    TRY(nvml_mig_enabled(device, &card));
    TRY(by_id(card, id, &profile));
    if (!instances || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig *mig = &node_state->mig[card];
    *count = 0;
    for (uint32_t gpu = 0; gpu < FENKA_NODE_MIG_GPU_INSTANCES; gpu++)
        if (mig->gpus[gpu].present && mig_profile_of(mig, gpu) == profile)
            instances[(*count)++] = nvml_gpu_handle(card, gpu);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance) {
    uint32_t card;
    TRY(nvml_mig_enabled(device, &card));
    if (!instance)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (id >= FENKA_NODE_MIG_GPU_INSTANCES || !node_state->mig[card].gpus[id].present)
        return NVML_ERROR_NOT_FOUND;
    *instance = nvml_gpu_handle(card, id);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t handle, nvmlGpuInstanceInfo_t *info) {
    uint32_t card, gpu;
    TRY(nvml_gpu_instance(handle, &card, &gpu));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig *mig = &node_state->mig[card];
    const struct fenka_node_mig_profile *profile = mig_profile_of(mig, gpu);
    *info = (nvmlGpuInstanceInfo_t){.device = nvml_handle(card),
                                    .id = gpu,
                                    .profileId = profile->id,
                                    .placement = {mig->gpus[gpu].start, profile->size}};
    return NVML_SUCCESS;
}
