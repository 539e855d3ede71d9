/* MIG mode, and the devices that compute instances are. */
#include "nvml_mig.h"

#include <errno.h>

static nvmlReturn_t code_of(int error) {
    switch (error) {
    case 0:
        return NVML_SUCCESS;
    case EINVAL:
        return NVML_ERROR_INVALID_ARGUMENT;
    case EPERM:
        return NVML_ERROR_NO_PERMISSION;
    case EOPNOTSUPP:
        return NVML_ERROR_NOT_SUPPORTED;
    case ENOENT:
        return NVML_ERROR_NOT_FOUND;
    case EBUSY:
        return NVML_ERROR_IN_USE;
    case EAGAIN:
        return NVML_ERROR_RESET_REQUIRED;
    case ENOSPC:
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    default:
        return NVML_ERROR_UNKNOWN;
    }
}

nvmlReturn_t nvml_mig_run(uint32_t act, uint32_t card, int64_t value, uint32_t *id) {
    struct node_command command = {act, card, value};
    struct node_answer answer;
    if (!node_run(&command, &answer))
        return NVML_ERROR_GPU_IS_LOST;
    if (id)
        *id = answer.id;
    return code_of(answer.error);
}

nvmlReturn_t nvml_mig_card(nvmlDevice_t device, uint32_t *card) {
    if (nvml_is_mig(device))
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvml_card(device, card));
    return node_state->mig[*card].profile_count ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvml_mig_enabled(nvmlDevice_t device, uint32_t *card) {
    TRY(nvml_mig_card(device, card));
    return node_state->mig[*card].enabled ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    uint32_t card;
    TRY(nvml_mig_card(device, &card));
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = node_state->mig[card].enabled;
    *pending = node_state->mig[card].pending;
    return NVML_SUCCESS;
}

/* A mode that stays pending is a success; the second result says why. */
nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation) {
    uint32_t card;
    TRY(nvml_mig_card(device, &card));
    if (!activation || mode > NVML_DEVICE_MIG_ENABLE)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = nvml_mig_run(FENKA_NODE_MIG_MODE, card, mode, NULL);
    *activation = result;
    bool stored = result == NVML_ERROR_IN_USE || result == NVML_ERROR_RESET_REQUIRED;
    return stored ? NVML_SUCCESS : result;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!is_mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    *is_mig = target.mig;
    return NVML_SUCCESS;
}

static nvmlReturn_t id_of(nvmlDevice_t device, unsigned int *id, bool of_gpu) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!target.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = of_gpu ? target.instance.gpu : target.instance.compute;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) { return id_of(device, id, true); }

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) { return id_of(device, id, false); }

/* NVML counts none while MIG is disabled. */
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    uint32_t card;
    if (nvml_is_mig(device))
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvml_card(device, &card));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = node_state->mig[card].enabled ? node_state->mig[card].slices : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *handle) {
    uint32_t card;
    unsigned count;
    struct mig_instance instance;
    TRY(nvml_mig_card(device, &card));
    TRY(nvmlDeviceGetMaxMigDeviceCount(device, &count));
    if (!handle || index >= count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!mig_instance_at(&node_state->mig[card], index, &instance))
        return NVML_ERROR_NOT_FOUND;
    *handle = nvml_mig_handle(card, instance, false);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *card) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!target.mig || !card)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = nvml_handle(target.card);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!target.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!attributes)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fenka_node_mig *mig = &node_state->mig[target.card];
    const struct fenka_node_mig_profile *profile = mig_profile_of(mig, target.instance.gpu);
    const struct fenka_node_mig_compute *compute = &mig->gpus[target.instance.gpu].compute[target.instance.compute];
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = compute->sm_count,
        .sharedCopyEngineCount = profile->engines[0],
        .sharedDecoderCount = profile->engines[1],
        .sharedEncoderCount = profile->engines[2],
        .sharedJpegCount = profile->engines[3],
        .sharedOfaCount = profile->engines[4],
        .gpuInstanceSliceCount = profile->slices,
        .computeInstanceSliceCount = compute->slices,
        .memorySizeMB = profile->memory_mib,
    };
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    return nvmlDeviceGetAttributes_v2(device, attributes);
}
