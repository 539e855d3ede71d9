/* What handles stand for: cards, GPU instances, compute instances, and the devices that they are. */
#include <strings.h>

#include "nvml_mig.h"

/* Their addresses are the handles. An instance that is created again has another handle, so that an old one is
 * recognised for a while. */
#define GENERATIONS 32
static char cards[FENKA_NODE_CARDS];
static char gpus[FENKA_NODE_CARDS][FENKA_NODE_MIG_GPU_INSTANCES][GENERATIONS];
static char computes[FENKA_NODE_CARDS][FENKA_NODE_MIG_GPU_INSTANCES][FENKA_NODE_MIG_COMPUTE_INSTANCES][GENERATIONS];
/* The second half is what nvmlComputeInstanceGetInfo_v2 returns: the same device, but nvidia-smi prints its index as
 * that of the card. */
static char devices[2][FENKA_NODE_CARDS][FENKA_NODE_MIG_GPU_INSTANCES][FENKA_NODE_MIG_COMPUTE_INSTANCES][GENERATIONS];

bool nvml_is_mig(nvmlDevice_t device) { return (uintptr_t)device - (uintptr_t)devices < sizeof devices; }

nvmlReturn_t nvml_card(nvmlDevice_t device, uint32_t *card) {
    TRY(nvml_ready());
    uintptr_t number = (uintptr_t)device - (uintptr_t)cards;
    if (nvml_is_mig(device))
        return NVML_ERROR_NOT_SUPPORTED;
    if (number >= node_state->card_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = (uint32_t)number;
    return node_card_lost(*card) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlDevice_t nvml_handle(uint32_t card) { return (nvmlDevice_t)(void *)&cards[card]; }

nvmlGpuInstance_t nvml_gpu_handle(uint32_t card, uint32_t gpu) {
    uint32_t generation = node_state->mig[card].gpus[gpu].generation;
    return (nvmlGpuInstance_t)(void *)&gpus[card][gpu][generation % GENERATIONS];
}

static uint32_t generation_of(uint32_t card, struct mig_instance instance) {
    const struct fenka_node_mig_gpu *gpu = &node_state->mig[card].gpus[instance.gpu];
    return (gpu->generation + gpu->compute[instance.compute].generation) % GENERATIONS;
}

nvmlComputeInstance_t nvml_compute_handle(uint32_t card, struct mig_instance instance) {
    return (
        nvmlComputeInstance_t)(void *)&computes[card][instance.gpu][instance.compute][generation_of(card, instance)];
}

nvmlDevice_t nvml_mig_handle(uint32_t card, struct mig_instance instance, bool of_compute) {
    return (
        nvmlDevice_t)(void *)&devices[of_compute][card][instance.gpu][instance.compute][generation_of(card, instance)];
}

nvmlReturn_t nvml_gpu_instance(nvmlGpuInstance_t handle, uint32_t *card, uint32_t *gpu) {
    TRY(nvml_ready());
    uintptr_t number = (uintptr_t)handle - (uintptr_t)gpus;
    if (number >= sizeof gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = (uint32_t)(number / sizeof gpus[0]);
    *gpu = (uint32_t)(number / GENERATIONS % FENKA_NODE_MIG_GPU_INSTANCES);
    if (!node_state->mig[*card].gpus[*gpu].present || nvml_gpu_handle(*card, *gpu) != handle)
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_SUCCESS;
}

static bool instance_in(uintptr_t handle, const void *handles, uint32_t *card, struct mig_instance *instance) {
    uintptr_t number = handle - (uintptr_t)handles;
    if (number >= sizeof computes)
        return false;
    *card = (uint32_t)(number / sizeof computes[0]);
    instance->gpu = (uint32_t)(number / sizeof computes[0][0] % FENKA_NODE_MIG_GPU_INSTANCES);
    instance->compute = (uint32_t)(number / GENERATIONS % FENKA_NODE_MIG_COMPUTE_INSTANCES);
    return mig_present(&node_state->mig[*card], *instance) && number % GENERATIONS == generation_of(*card, *instance);
}

nvmlReturn_t nvml_compute_instance(nvmlComputeInstance_t handle, uint32_t *card, struct mig_instance *instance) {
    TRY(nvml_ready());
    return instance_in((uintptr_t)handle, computes, card, instance) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvml_target(nvmlDevice_t device, struct nvml_target *target) {
    TRY(nvml_ready());
    *target = (struct nvml_target){.mig = false};
    if (!nvml_is_mig(device))
        return nvml_card(device, &target->card);
    target->mig = true;
    target->of_compute = (uintptr_t)device >= (uintptr_t)devices[1];
    if (!instance_in((uintptr_t)device, devices[target->of_compute], &target->card, &target->instance))
        return NVML_ERROR_INVALID_ARGUMENT;
    return node_card_lost(target->card) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

bool nvml_mig_by_uuid(const char *uuid, nvmlDevice_t *device) {
    char text[48];
    struct mig_instance instance;
    for (uint32_t card = 0; card < node_state->card_count; card++)
        for (unsigned n = 0; mig_instance_at(&node_state->mig[card], n, &instance); n++) {
            mig_uuid(text, &node_state->cards[card], &node_state->mig[card], instance);
            if (strcasecmp(text, uuid) == 0) {
                *device = nvml_mig_handle(card, instance, false);
                return true;
            }
        }
    return false;
}
