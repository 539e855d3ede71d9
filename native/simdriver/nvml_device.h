/* What the parts of the simulated NVML know of each other. */
#ifndef FENKA_SIMULATED_NVML_DEVICE_H
#define FENKA_SIMULATED_NVML_DEVICE_H
#include "nvml_header.h"

#include <stdint.h>

#include "node.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        nvmlReturn_t tried_ = (call);                                                              \
        if (tried_ != NVML_SUCCESS)                                                                \
            return tried_;                                                                         \
    } while (0)

/* NVML_ERROR_UNINITIALIZED before nvmlInit, NVML_ERROR_GPU_IS_LOST once the card server has gone. */
nvmlReturn_t nvml_ready(void);
/* A handle stays good over a fork and over a shutdown, as those of the real NVML do.
 * NVML_ERROR_GPU_IS_LOST where the card has fallen off the bus. */
nvmlReturn_t nvml_card(nvmlDevice_t device, uint32_t *card);
nvmlDevice_t nvml_handle(uint32_t card);
/* Frees every event set; those that wait in one are told. */
void nvml_events_end(void);
nvmlReturn_t nvml_text(char *to, unsigned length, const char *text);
#endif
