/* Handles of MIG: GPU instances, compute instances, and the devices that programs see. */
#ifndef FENKA_SIMULATED_NVML_MIG_H
#define FENKA_SIMULATED_NVML_MIG_H
#include "mig.h"
#include "nvml_device.h"

/* NVML_ERROR_NOT_SUPPORTED if the card has no MIG, or if it is disabled. */
nvmlReturn_t nvml_mig_card(nvmlDevice_t device, uint32_t *card);
nvmlReturn_t nvml_mig_enabled(nvmlDevice_t device, uint32_t *card);
/* NVML_ERROR_INVALID_ARGUMENT if the instance has ended. */
nvmlReturn_t nvml_gpu_instance(nvmlGpuInstance_t handle, uint32_t *card, uint32_t *gpu);
nvmlReturn_t nvml_compute_instance(nvmlComputeInstance_t handle, uint32_t *card, struct mig_instance *instance);
nvmlGpuInstance_t nvml_gpu_handle(uint32_t card, uint32_t gpu);
nvmlComputeInstance_t nvml_compute_handle(uint32_t card, struct mig_instance instance);
nvmlDevice_t nvml_mig_handle(uint32_t card, struct mig_instance instance, bool of_compute);
/* Asks the card server. `id`: of the created instance; may be NULL. */
nvmlReturn_t nvml_mig_run(uint32_t act, uint32_t card, int64_t value, uint32_t *id);
#endif
