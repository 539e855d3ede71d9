#include "context_charge.h"

#include <string.h>

#include "account.h"
#include "charge.h"
#include "control.h"
#include "fenka/lease.h"
#include "os.h"

#define MORE_THAN_ANY_CARD ((uint64_t)1 << 50)

static struct os_lock lock;
static struct {
    unsigned contexts;
    uint64_t charged;
} cards[FENKA_MAX_CARDS];
static uint64_t code_bytes; /* in every context */

void context_charge_reset(void) {
    memset(cards, 0, sizeof cards);
    code_bytes = 0;
    lock.held = 0;
}

CUresult context_charge(CUdevice device, struct target *target) {
    CUresult result = target_device(target, device);
    if (result != CUDA_SUCCESS)
        return result;
    os_lock(&lock);
    if (cards[target->card].contexts == 0) {
        cards[target->card].charged = control_context_bytes(target->card) + code_bytes;
        result = charge(target, cards[target->card].charged);
    }
    cards[target->card].contexts += result == CUDA_SUCCESS;
    os_unlock(&lock);
    return result;
}

void context_discharge(unsigned card) {
    os_lock(&lock);
    if (--cards[card].contexts == 0)
        account_discharge(card, cards[card].charged);
    os_unlock(&lock);
}

/* On the first `count` cards. The caller holds the lock. */
static void discharge_code(uint64_t bytes, unsigned count) {
    for (unsigned card = 0; card < count; card++)
        if (cards[card].contexts) {
            cards[card].charged -= bytes;
            account_discharge(card, bytes);
        }
}

CUresult context_charge_code(uint64_t bytes) {
    CUresult result = lease_ready() ? CUDA_SUCCESS : LEASE_BROKEN;
    unsigned card = 0;
    os_lock(&lock);
    if (result == CUDA_SUCCESS && (bytes > MORE_THAN_ANY_CARD || code_bytes + bytes > MORE_THAN_ANY_CARD))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    for (; card < FENKA_MAX_CARDS && result == CUDA_SUCCESS; card++) {
        if (!cards[card].contexts)
            continue;
        result = charge(&(struct target){.card = (uint8_t)card}, bytes);
        if (result != CUDA_SUCCESS)
            break;
        cards[card].charged += bytes;
    }
    if (result == CUDA_SUCCESS)
        code_bytes += bytes;
    else
        discharge_code(bytes, card);
    os_unlock(&lock);
    return result;
}

void context_discharge_code(uint64_t bytes) {
    os_lock(&lock);
    code_bytes -= bytes;
    discharge_code(bytes, FENKA_MAX_CARDS);
    os_unlock(&lock);
}
