/* The one shape of every allocation: find the card, charge, call the driver, give back what it refused. */
#ifndef FENKA_CHARGE_H
#define FENKA_CHARGE_H
#include "allocations.h"
#include "lease.h"

/* Where memory will lie, and the context it will die with (0 = none that we would see). */
struct target {
    uint64_t owner;
    uint8_t card;
};

CUresult target_current(struct target *target);
CUresult target_device(struct target *target, CUdevice device);
CUresult target_stream(struct target *target, CUstream stream); /* the device of the stream */
CUresult target_location(struct target *target, CUmemLocation location);

/* CUDA_ERROR_OUT_OF_MEMORY when the slice is full, exactly as the driver says when the card is. */
CUresult charge(const struct target *target, uint64_t bytes);

/* After the driver's answer: notes what was charged under the key, or discharges it. */
CUresult charge_commit_as(CUresult result, const struct target *target, uint64_t bytes, enum kind kind, uint64_t key,
                   uint8_t shared);
static inline CUresult charge_commit(CUresult result, const struct target *target, uint64_t bytes, enum kind kind,
                              uint64_t key) {
    return charge_commit_as(result, target, bytes, kind, key, OWN);
}

/* The driver has freed it: whatever it is charged as, it is no longer. */
void discharge_allocation(const struct allocation *gone);

/* Around a call that frees: takes the holding out before the driver can give its address to another
 * thread, and puts it back if the driver would not free it. */
bool free_begin(enum kind kind, uint64_t key, struct allocation *allocation);
CUresult free_end(CUresult result, bool last, const struct allocation *allocation);

/* Leaves the function unless the place is known and the bytes are granted. */
#define CHARGE_OR_RETURN(target, where, bytes)    \
    do {                                         \
        CUresult refusal_ = (where);             \
        if (refusal_ == CUDA_SUCCESS)            \
            refusal_ = charge((target), (bytes)); \
        if (refusal_ != CUDA_SUCCESS)            \
            return refusal_;                     \
    } while (0)
#endif
