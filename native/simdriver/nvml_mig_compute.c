/* Compute instances: the parts of a GPU instance that programs use. */
#include <stdio.h>

#include "nvml_mig.h"

struct offer {
    uint32_t card, gpu;
    const struct fenka_node_mig_profile *within;
    struct mig_compute_profile compute;
};

static nvmlReturn_t offer_of(nvmlGpuInstance_t handle, unsigned kind, struct offer *offer) {
    TRY(nvml_gpu_instance(handle, &offer->card, &offer->gpu));
    if (kind >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig *mig = &node_state->mig[offer->card];
    offer->within = mig_profile_of(mig, offer->gpu);
    return mig_compute_profile(mig, offer->within, kind, &offer->compute) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Versions differ in what stands before and after these fields. */
#define FILL(info, offer)                                            \
    do {                                                             \
        (info)->id = (offer)->compute.kind;                          \
        (info)->sliceCount = (offer)->compute.slices;                \
        (info)->instanceCount = (offer)->compute.limit;              \
        (info)->multiprocessorCount = (offer)->compute.sm_count;     \
        (info)->sharedCopyEngineCount = (offer)->within->engines[0]; \
        (info)->sharedDecoderCount = (offer)->within->engines[1];    \
        (info)->sharedEncoderCount = (offer)->within->engines[2];    \
        (info)->sharedJpegCount = (offer)->within->engines[3];       \
        (info)->sharedOfaCount = (offer)->within->engines[4];        \
    } while (0)

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t handle, unsigned int kind,
                                                          unsigned int engines,
                                                          nvmlComputeInstanceProfileInfo_t *info) {
    struct offer offer;
    if (!info || engines >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(offer_of(handle, kind, &offer));
    FILL(info, &offer);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t handle, unsigned int kind,
                                                           unsigned int engines,
                                                           nvmlComputeInstanceProfileInfo_v2_t *info) {
    struct offer offer;
    char name[32];
    if (!info || engines >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlComputeInstanceProfileInfo_v2 && info->version != nvmlComputeInstanceProfileInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(offer_of(handle, kind, &offer));
    FILL(info, &offer);
    mig_name(name, offer.within, offer.compute.slices);
    snprintf(info->name, sizeof info->name, "MIG %s", name);
    if (info->version == nvmlComputeInstanceProfileInfo_v3)
        ((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = 0;
    return NVML_SUCCESS;
}

static unsigned free_starts(const struct offer *offer) {
    const struct fenka_node_mig_gpu *gpu = &node_state->mig[offer->card].gpus[offer->gpu];
    unsigned count = 0;
    for (unsigned n = 0; n < offer->compute.limit; n++) {
        uint32_t start = mig_compute_start(offer->within, &offer->compute, n);
        count += start != MIG_NO_START && mig_compute_fits(gpu, start, offer->compute.slices);
    }
    return count;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t handle, unsigned int kind,
                                                                unsigned int *count) {
    struct offer offer;
    TRY(offer_of(handle, kind, &offer));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = free_starts(&offer);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t handle, unsigned int kind,
                                                                 nvmlComputeInstancePlacement_t *placements,
                                                                 unsigned int *count) {
    struct offer offer;
    TRY(offer_of(handle, kind, &offer));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    for (unsigned n = 0; n < offer.compute.limit; n++) {
        uint32_t start = mig_compute_start(offer.within, &offer.compute, n);
        if (start == MIG_NO_START)
            continue;
        if (placements)
            placements[*count] = (nvmlComputeInstancePlacement_t){start, offer.compute.slices};
        ++*count;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t create(nvmlGpuInstance_t handle, unsigned kind, unsigned start, nvmlComputeInstance_t *instance) {
    struct offer offer;
    uint32_t id;
    TRY(offer_of(handle, kind, &offer));
    if (!instance)
        return NVML_ERROR_INVALID_ARGUMENT;
    int64_t value = offer.gpu | (int64_t)kind << 8 | (int64_t)start << 16;
    TRY(nvml_mig_run(FENKA_NODE_MIG_CREATE_CI, offer.card, value, &id));
    *instance = nvml_compute_handle(offer.card, (struct mig_instance){offer.gpu, id});
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t handle, unsigned int kind,
                                                  nvmlComputeInstance_t *instance) {
    return create(handle, kind, 0, instance);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t handle, unsigned int kind,
                                                               const nvmlComputeInstancePlacement_t *placement,
                                                               nvmlComputeInstance_t *instance) {
    struct offer offer;
    TRY(offer_of(handle, kind, &offer));
    if (!placement || placement->size != offer.compute.slices || placement->start >= offer.within->slices)
        return NVML_ERROR_INVALID_ARGUMENT;
    return create(handle, kind, placement->start + 1, instance);
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t handle) {
    uint32_t card;
    struct mig_instance instance;
    TRY(nvml_compute_instance(handle, &card, &instance));
    return nvml_mig_run(FENKA_NODE_MIG_DESTROY_CI, card, instance.gpu | (int64_t)instance.compute << 8, NULL);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t handle, unsigned int kind,
                                                nvmlComputeInstance_t *instances, unsigned int *count) {
    struct offer offer;
    TRY(offer_of(handle, kind, &offer));
    if (!instances || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig_gpu *gpu = &node_state->mig[offer.card].gpus[offer.gpu];
    *count = 0;
    for (uint32_t id = 0; id < FENKA_NODE_MIG_COMPUTE_INSTANCES; id++)
        if (gpu->compute[id].present && gpu->compute[id].kind == kind)
            instances[(*count)++] = nvml_compute_handle(offer.card, (struct mig_instance){offer.gpu, id});
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t handle, unsigned int id,
                                                   nvmlComputeInstance_t *instance) {
    uint32_t card, gpu;
    TRY(nvml_gpu_instance(handle, &card, &gpu));
    if (!instance)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct mig_instance wanted = {gpu, id};
    if (id >= FENKA_NODE_MIG_COMPUTE_INSTANCES || !mig_present(&node_state->mig[card], wanted))
        return NVML_ERROR_NOT_FOUND;
    *instance = nvml_compute_handle(card, wanted);
    return NVML_SUCCESS;
}

/* `device` is the MIG device and not the card: NVIDIA's own programs take its UUID. */
nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *info) {
    uint32_t card;
    struct mig_instance instance;
    TRY(nvml_compute_instance(handle, &card, &instance));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig_compute *held = &node_state->mig[card].gpus[instance.gpu].compute[instance.compute];
    *info = (nvmlComputeInstanceInfo_t){.device = nvml_mig_handle(card, instance, true),
                                        .gpuInstance = nvml_gpu_handle(card, instance.gpu),
                                        .id = instance.compute,
                                        .profileId = held->kind,
                                        .placement = {held->start, held->slices}};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *info) {
    return nvmlComputeInstanceGetInfo_v2(handle, info);
}
