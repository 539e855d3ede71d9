/* cuInit succeeds only if the lease can be enforced on every device that the program sees. */
#include <string.h>

#include "control.h"
#include "driver_environment.h"
#include "fenka/lease.h"
#include "lease.h"
#include "os.h"
#include "visible_devices.h"

#define NOT_SHOWN "is a card of the lease, but the driver does not know it"

static bool initialized;
static struct os_lock initializing; /* the environment has one value at a time */
static __thread bool within;        /* the driver's cuInit has loaded a library that calls cuInit */

void init_reset(void) {
    initialized = false;
    within = false;
    initializing.held = 0;
}

static bool is_instance(unsigned card) { return !strncmp(control_uuid(card), "MIG-", 4); }

/* Whether the driver shows exactly the chosen cards; otherwise it has ignored CUDA_VISIBLE_DEVICES. Drivers before 570
 * show a program one MIG instance only. */
static bool shows_exactly(const uint8_t *chosen, unsigned count) {
    bool seen[FENKA_MAX_CARDS] = {false};
    int devices = 0;
    if (REAL(cuDeviceGetCount)(&devices) != CUDA_SUCCESS)
        devices = 0;
    for (CUdevice device = 0; device < devices; device++) {
        int card = card_of_device(device);
        if (card < 0) {
            lease_refuse("the driver", "shows a card that is not of the lease");
            return false;
        }
        seen[card] = true;
    }
    for (unsigned i = 0; i < count; i++)
        if (!seen[chosen[i]] && !(devices && is_instance(chosen[i]))) {
            lease_refuse(control_uuid(chosen[i]), NOT_SHOWN);
            return false;
        }
    return true;
}

/* The driver reads the variable until one cuInit has succeeded. */
static CUresult init_chosen(unsigned int flags) {
    uint8_t chosen[FENKA_MAX_CARDS];
    unsigned count = visible_cards(driver_environment_given(), chosen);
    driver_environment_set(chosen, count);
    within = true;
    CUresult result = REAL(cuInit)(flags);
    within = false;
    driver_environment_restore();
    if (result != CUDA_SUCCESS && !(result == CUDA_ERROR_NO_DEVICE && count))
        return result;
    if (!shows_exactly(chosen, count))
        return LEASE_BROKEN;
    __atomic_store_n(&initialized, result == CUDA_SUCCESS, __ATOMIC_RELEASE);
    return result;
}

CUresult cuInit(unsigned int flags) {
    if (!lease_ready() || !lease_lock_account())
        return LEASE_BROKEN;
    if (within || __atomic_load_n(&initialized, __ATOMIC_ACQUIRE))
        return REAL(cuInit)(flags);
    os_lock(&initializing);
    CUresult result = __atomic_load_n(&initialized, __ATOMIC_ACQUIRE) ? REAL(cuInit)(flags) : init_chosen(flags);
    os_unlock(&initializing);
    return result;
}
