/* Charges on a card whose context no hook may have seen. Contexts are charged by charge.c, so this is a file apart. */
#include "charge.h"
#include "context_charge.h"

CUresult charge(const struct target *target, uint64_t bytes) {
    if (!lease_ready())
        return LEASE_BROKEN;
    if (target->card != NO_CARD && !context_is_charged(target->card))
        context_adopt(target->card);
    CUresult result = charge_alone(target, bytes);
    return result == CUDA_ERROR_OUT_OF_MEMORY && contexts_poll(target->card) ? charge(target, bytes) : result;
}
