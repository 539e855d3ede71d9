/* The one shape of every allocation: find the card, charge, call the driver, give back what it refused. */
#ifndef FENKA_CHARGE_H
#define FENKA_CHARGE_H
#include "holdings.h"
#include "lease.h"

/* Where memory will lie, and the context it will die with (0 = none that we would see). */
struct place {
    uint64_t owner;
    uint8_t card;
};

CUresult place_current(struct place *place);
CUresult place_device(struct place *place, CUdevice device);
CUresult place_stream(struct place *place, CUstream stream); /* the device of the stream */
CUresult place_location(struct place *place, CUmemLocation location);

/* CUDA_ERROR_OUT_OF_MEMORY when the slice is full, exactly as the driver says when the card is. */
CUresult charge(const struct place *place, uint64_t bytes);

/* After the driver's answer: notes what was charged under the key, or discharges it. */
CUresult settle_as(CUresult result, const struct place *place, uint64_t bytes, enum kind kind, uint64_t key,
                   uint8_t shared);
static inline CUresult settle(CUresult result, const struct place *place, uint64_t bytes, enum kind kind,
                              uint64_t key) {
    return settle_as(result, place, bytes, kind, key, OWN);
}

/* The driver has freed it: whatever it is charged as, it is no longer. */
void give_up(const struct holding *gone);

/* Around a call that frees: takes the holding out before the driver can give its address to another
 * thread, and puts it back if the driver would not free it. */
bool release(enum kind kind, uint64_t key, struct holding *holding);
CUresult released(CUresult result, bool last, const struct holding *holding);

/* Leaves the function unless the place is known and the bytes are granted. */
#define CHARGE_OR_RETURN(place, where, bytes)    \
    do {                                         \
        CUresult refusal_ = (where);             \
        if (refusal_ == CUDA_SUCCESS)            \
            refusal_ = charge((place), (bytes)); \
        if (refusal_ != CUDA_SUCCESS)            \
            return refusal_;                     \
    } while (0)
#endif
