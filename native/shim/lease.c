#include "lease.h"

#include <stdio.h>
#include <stdlib.h>

#include "account.h"
#include "account_lock.h"
#include "control.h"
#include "os.h"

#define ISOLATED "/run/fenka"
#define MAX_DEVICES 64

bool lease_joined;
static struct os_lock joining;
static bool refused;
static int8_t cards[MAX_DEVICES]; /* by CUdevice: card + 1; 0 = unknown yet */

void lease_reset(void) {
    lease_joined = false;
    joining.held = 0;
}

void lease_refuse(const char *subject, const char *fault) {
    char line[4352];
    if (__atomic_exchange_n(&refused, true, __ATOMIC_RELAXED))
        return;
    snprintf(line, sizeof line, "fenka: no GPU for this process: %s %s\n", subject, fault);
    os_print_error(line);
}

/* Inside an isolated lease the environment is ignored, because the program controls it. */
static const char *lease_directory(void) {
    return os_exists(ISOLATED "/lease/control") ? ISOLATED : getenv("FENKA_LEASE");
}

static bool join(void) {
    char path[4096];
    const char *fault, *directory = lease_directory();
    if (!directory || !*directory) {
        lease_refuse("it holds no lease:", ISOLATED "/lease/control does not exist and FENKA_LEASE is not set");
        return false;
    }
    snprintf(path, sizeof path, "%s/lease/control", directory);
    fault = control_open(path);
    if (!fault) {
        snprintf(path, sizeof path, "%s/account/slots", directory);
        fault = account_open(path);
    }
    if (fault)
        lease_refuse(path, fault);
    return !fault;
}

bool lease_join(void) {
    lease_hold(); /* unlocked: it may take hours */
    os_lock(&joining);
    if (!lease_joined)
        __atomic_store_n(&lease_joined, join(), __ATOMIC_RELEASE);
    os_unlock(&joining);
    return lease_joined;
}

bool lease_lock_account(void) {
    os_lock(&joining);
    bool locked = account_lock_set();
    os_unlock(&joining);
    if (!locked)
        lease_refuse("the account", "cannot be locked");
    return locked;
}

/* By UUID, because CUDA_VISIBLE_DEVICES may reorder and hide cards. */
static int find_card(CUdevice device) {
    char text[37];
    CUuuid id;
    CUresult result =
        HAS(cuDeviceGetUuid_v2) ? REAL(cuDeviceGetUuid_v2)(&id, device) : REAL(cuDeviceGetUuid)(&id, device);
    if (result != CUDA_SUCCESS)
        return -1;
    const unsigned char *b = (const unsigned char *)id.bytes;
    snprintf(text, sizeof text, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return control_find_card(text);
}

CUdevice device_of_card(unsigned card) {
    int devices = 0;
    REAL(cuDeviceGetCount)(&devices);
    for (CUdevice device = 0; device < devices; device++)
        if (card_of_device(device) == (int)card)
            return device;
    return -1;
}

int card_of_device(CUdevice device) {
    if (device < 0 || device >= MAX_DEVICES || !lease_ready())
        return -1;
    int card = __atomic_load_n(&cards[device], __ATOMIC_RELAXED) - 1;
    if (card < 0) {
        card = find_card(device);
        __atomic_store_n(&cards[device], (int8_t)(card + 1), __ATOMIC_RELAXED);
    }
    return card;
}
