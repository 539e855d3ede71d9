/* The steps of every allocation: find the card, charge, call the driver, and discharge what the driver refused. */
#ifndef FENKA_CHARGE_H
#define FENKA_CHARGE_H
#include "allocations.h"
#include "lease.h"
#include "target.h"

/* CUDA_ERROR_OUT_OF_MEMORY when the slice is full, as the driver answers when the card is full. */
CUresult charge(const struct target *target, uint64_t bytes);
/* Without a look for contexts that no hook has seen. The lease is ready. */
CUresult charge_alone(const struct target *target, uint64_t bytes);

/* After the driver's call: records what was charged under the key, or discharges it. Returns the result. */
CUresult charge_commit_as(CUresult result, const struct target *target, uint64_t bytes, enum kind kind, uint64_t key,
                          uint8_t shared);
static inline CUresult charge_commit(CUresult result, const struct target *target, uint64_t bytes, enum kind kind,
                                     uint64_t key) {
    return charge_commit_as(result, target, bytes, kind, key, OWN);
}

/* Ends the charge of an allocation that the driver has freed, however it is charged. */
void discharge_allocation(const struct allocation *freed);

/* The context has ended, and all memory that it owned. */
void discharge_owned(uint64_t context);

/* Around a driver call that frees. free_begin removes the allocation before the driver can reuse its address in
 * another thread; true when that was the last reference. free_end puts it back if the driver has not freed it. */
bool free_begin(enum kind kind, uint64_t key, struct allocation *allocation);
CUresult free_end(CUresult result, bool last, const struct allocation *allocation);

/* Returns from the calling function unless the target is found and the bytes are granted. */
#define CHARGE_OR_RETURN(target, find_target, bytes) CHARGE_BY(charge, target, find_target, bytes)
#define CHARGE_BY(grant, target, find_target, bytes) \
    do {                                             \
        CUresult refusal_ = (find_target);           \
        if (refusal_ == CUDA_SUCCESS)                \
            refusal_ = grant((target), (bytes));     \
        if (refusal_ != CUDA_SUCCESS)                \
            return refusal_;                         \
    } while (0)
#endif
