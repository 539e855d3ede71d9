/* Finds the card that an allocation or a launch is for. */
#ifndef FENKA_TARGET_H
#define FENKA_TARGET_H
#include <stdint.h>

#include "allocations.h"
#include "lease.h"

struct target {
    uint64_t owner; /* the context that the memory dies with; 0 = none that the shim would see */
    uint8_t card;   /* or NO_CARD */
};

CUresult target_current(struct target *target);
CUresult target_device(struct target *target, CUdevice device);
CUresult target_stream(struct target *target, CUstream stream);
CUresult target_location(struct target *target, CUmemLocation location);
CUresult target_pool_kind(struct target *target, CUmemLocation location, CUmemAllocationType type);
#endif
