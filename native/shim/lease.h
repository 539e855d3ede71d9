/* Joining the lease: control page, account, and which card each device of the driver is. */
#ifndef FENKA_SHIM_LEASE_H
#define FENKA_SHIM_LEASE_H
#include <stdbool.h>

#include "resolve.h"

/* What every hook answers while the lease cannot be joined or is broken: "the system is not ready to start
 * any CUDA work". Not out-of-memory, which allocators retry, nor no-device, which programs take as a hint
 * to run without one. */
#define LEASE_BROKEN CUDA_ERROR_SYSTEM_NOT_READY

extern bool lease_joined;
bool lease_join(void); /* on failure says why on standard error, once per process */

static inline bool lease_ready(void) {
    return __builtin_expect(__atomic_load_n(&lease_joined, __ATOMIC_ACQUIRE), 1) || lease_join();
}

/* Refuses the GPU with one line, once per process: "fenka: no GPU for this process: SUBJECT FAULT". */
void lease_refuse(const char *subject, const char *fault);

/* The card of the control page that a device of the driver is; -1 = none, or no lease. */
int card_of_device(CUdevice device);
#endif
