#include "context_charge.h"

#include <string.h>

#include "account.h"
#include "charge.h"
#include "context_state.h"
#include "control.h"
#include "fenka/lease.h"
#include "os.h"

#define MORE_THAN_ANY_CARD ((uint64_t)1 << 50)

static struct os_lock lock;
static struct {
    unsigned contexts;
    uint64_t charged;
} cards[FENKA_MAX_CARDS];
static uint64_t code_bytes;           /* in every context */
static bool adopted[FENKA_MAX_CARDS]; /* the primary context */
uint8_t contexts_charged[FENKA_MAX_CARDS];

void context_charge_reset(void) {
    memset(cards, 0, sizeof cards);
    memset(adopted, 0, sizeof adopted);
    memset(contexts_charged, 0, sizeof contexts_charged);
    code_bytes = 0;
    lock.held = 0;
}

/* The caller holds the lock. */
static void set_contexts(unsigned card, unsigned count) {
    cards[card].contexts = count;
    __atomic_store_n(&contexts_charged[card], count > 0, __ATOMIC_RELAXED);
}

CUresult context_charge(CUdevice device, struct target *target) {
    CUresult result = target_device(target, device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!lease_ready())
        return LEASE_BROKEN;
    context_adopt(target->card);
    os_lock(&lock);
    if (cards[target->card].contexts == 0) {
        cards[target->card].charged = control_context_bytes(target->card) + code_bytes;
        result = charge_alone(target, cards[target->card].charged);
    }
    set_contexts(target->card, cards[target->card].contexts + (result == CUDA_SUCCESS));
    os_unlock(&lock);
    return result;
}

void context_discharge(unsigned card) {
    os_lock(&lock);
    set_contexts(card, cards[card].contexts - 1);
    if (cards[card].contexts == 0)
        account_discharge(card, cards[card].charged);
    os_unlock(&lock);
}

/* The primary context's handle; NULL = it is not active. The driver counts the retain, so a context that ends meanwhile
 * does so with the release. */
static CUcontext active_primary(CUdevice device) {
    unsigned int flags;
    int active = 0;
    CUcontext context = NULL;
    if (REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS || !active ||
        REAL(cuDevicePrimaryCtxRetain)(&context, device) != CUDA_SUCCESS)
        return NULL;
    REAL(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

/* A context that has ended may still be current; drivers from CUDA 12.0 on say whether it exists. */
static CUcontext current_on(CUdevice device) {
    CUcontext context = NULL;
    CUdevice its;
    unsigned long long number;
    bool there = REAL(cuCtxGetCurrent)(&context) == CUDA_SUCCESS && context &&
                 REAL(cuCtxGetDevice)(&its) == CUDA_SUCCESS && its == device && HAS(cuCtxGetId) &&
                 REAL(cuCtxGetId)(context, &number) == CUDA_SUCCESS;
    return there ? context : NULL;
}

void context_adopt(unsigned card) {
    CUdevice device = device_of_card(card);
    CUcontext primary = context_is_charged(card) || device < 0 ? NULL : active_primary(device);
    CUcontext context = primary || context_is_charged(card) || device < 0 ? primary : current_on(device);
    if (!context)
        return;
    os_lock(&lock);
    bool first = cards[card].contexts == 0;
    if (first) {
        cards[card].charged = control_context_bytes(card) + code_bytes;
        account_force_charge(card, cards[card].charged);
        set_contexts(card, 1);
        __atomic_store_n(&adopted[card], primary != NULL, __ATOMIC_RELAXED);
        if (primary)
            context_set_primary(card, (uint64_t)primary);
    }
    os_unlock(&lock);
    if (first && !primary)
        charge_commit(CUDA_SUCCESS, &(struct target){.card = (uint8_t)card}, 0, CONTEXT, (uint64_t)context);
}

/* A primary context that was made again meanwhile may have the same handle, so its predecessor's memory stays charged. */
bool contexts_poll(unsigned card) {
    unsigned int flags;
    int active = 1;
    if (!__atomic_load_n(&adopted[card], __ATOMIC_RELAXED) ||
        REAL(cuDevicePrimaryCtxGetState)(device_of_card(card), &flags, &active) != CUDA_SUCCESS || active)
        return false;
    uint64_t ended = context_set_primary(card, 0);
    if (!ended)
        return false;
    __atomic_store_n(&adopted[card], false, __ATOMIC_RELAXED);
    discharge_owned(ended);
    context_discharge(card);
    return true;
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
    for (; result == CUDA_SUCCESS && card < control_cards(); card++)
        if (!contexts_poll(card))
            context_adopt(card);
    card = 0;
    os_lock(&lock);
    if (result == CUDA_SUCCESS && (bytes > MORE_THAN_ANY_CARD || code_bytes + bytes > MORE_THAN_ANY_CARD))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    for (; card < FENKA_MAX_CARDS && result == CUDA_SUCCESS; card++) {
        if (!cards[card].contexts)
            continue;
        result = charge_alone(&(struct target){.card = (uint8_t)card}, bytes);
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
