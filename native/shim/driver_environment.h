/* The variable by which the driver chooses cards, as the driver reads it and as the program was started with it. */
#ifndef FENKA_SHIM_DRIVER_ENVIRONMENT_H
#define FENKA_SHIM_DRIVER_ENVIRONMENT_H
#include <stdint.h>

/* What the program gave: CUDA_VISIBLE_DEVICES, or NULL. */
const char *driver_environment_given(void);

/* Names the chosen cards by UUID, for the driver's next cuInit. Until driver_environment_restore, no other call. */
void driver_environment_set(const uint8_t *chosen, unsigned count);

/* Puts back what the program gave, which its own code and its children read. */
void driver_environment_restore(void);
#endif
