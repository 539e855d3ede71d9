/* Joining the lease: control page, account, and which card each device of the driver is. */
#ifndef FENKA_SHIM_LEASE_H
#define FENKA_SHIM_LEASE_H
#include <stdbool.h>

#include "resolve.h"

/* The answer of every hook while the lease cannot be joined: "the system is not ready to start any CUDA work". Not
 * out-of-memory, which allocators retry, nor no-device, with which programs continue without a card. */
#define LEASE_BROKEN CUDA_ERROR_SYSTEM_NOT_READY

extern bool lease_joined;
bool lease_join(void); /* prints the reason of a failure to standard error, once per process */

static inline bool lease_ready(void) {
    return __builtin_expect(__atomic_load_n(&lease_joined, __ATOMIC_ACQUIRE), 1) || lease_join();
}

/* Before the driver is opened: sets the lock that its descriptors are inherited with. False if the account cannot be
 * locked; prints the reason like lease_join. */
bool lease_lock_account(void);

/* Refuses the GPU with one line, once per process: "fenka: no GPU for this process: SUBJECT FAULT". */
void lease_refuse(const char *subject, const char *fault);

/* The index of the device's card in the control page; -1 = not in the lease, or no lease. */
int card_of_device(CUdevice device);
CUdevice device_of_card(unsigned card); /* -1 = the program does not see it */

/* Returns when this container's slice is granted; at once in all other leases. */
void lease_hold(void);

/* In a child after fork. */
void lease_reset(void);
void init_reset(void);
#endif
