/* A container may start before its slice is free: its lease then has a file `pending` instead of limits. The container's
 * first process is held before its program starts, so that `docker logs` says what it waits for and `docker stop` ends it
 * at once. A program that runs already, because its first process is static or the shim is not in it, is held at its
 * first call of CUDA or NVML. The file's text is the daemon's sentence. */
#include <stdio.h>

#include "lease.h"
#include "os.h"

#define CONTROL "/run/fenka/lease/control"
#define PENDING "/run/fenka/lease/pending"

/* The limits are there before the file goes. Both are gone if the request was cancelled. */
static bool is_pending(void) { return os_exists(PENDING) && !os_exists(CONTROL); }

static void print_reason(void) {
    char reason[768], line[1024];
    os_read_text(PENDING, reason, sizeof reason);
    snprintf(line, sizeof line, "fenka: waiting for this container's slice: %s\n", reason);
    os_print_error(line);
}

void lease_hold(void) {
    static bool told;
    if (!is_pending())
        return;
    if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
        print_reason();
    while (is_pending())
        os_sleep_until(os_nanoseconds() + 20 * 1000 * 1000);
}

__attribute__((constructor)) static void hold_first_process(void) {
    if (!os_is_first_process() || !is_pending())
        return;
    os_obey_signals(true);
    lease_hold();
    os_obey_signals(false);
    os_print_error("fenka: the slice is granted\n");
}
