/* NVML's devices as cards of the lease. */
#ifndef FENKA_NVML_CARDS_H
#define FENKA_NVML_CARDS_H
#include "resolve.h"

/* The answer of NVML's hooks while the lease cannot be joined. */
#define NVML_LEASE_BROKEN NVML_ERROR_NO_PERMISSION

/* The device's card; -1 = not in the lease. */
int nvml_card(nvmlDevice_t device);

nvmlReturn_t nvml_handle_by_index(unsigned int card, nvmlDevice_t *device);
#endif
