#define _GNU_SOURCE
#include "driver_environment.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "fenka/lease.h"
#include "resolve_driver.h"

#define VISIBLE "CUDA_VISIBLE_DEVICES"

typedef int set_variable(const char *name, const char *value, int replace);
typedef int remove_variable(const char *name);

/* musl has no linker namespaces, and lacks this function. */
extern int dladdr1(const void *, Dl_info *, void **, int) __attribute__((weak));

static char *given; /* a copy; NULL = not set */

const char *driver_environment_given(void) { return getenv(VISIBLE); }

/* A driver that dlmopen has loaded has a C library, and with it an environment, of its own. glibc's handles are link
 * maps. NULL = the driver's is this library's. */
static void *elsewhere(const char *function, const void *here) {
    void *map = NULL;
    Dl_info info;
    void *real = (void *)REAL(cuInit);
    if (!dladdr1 || !dladdr1(real, &info, &map, RTLD_DL_LINKMAP) || !map)
        return NULL;
    void *found = dl_original_ready()->dlsym(map, function);
    dlerror();
    return found == here ? NULL : found;
}

void driver_environment_set(const uint8_t *chosen, unsigned count) {
    char list[FENKA_MAX_CARDS * sizeof((struct fenka_card_limit *)0)->uuid] = "";
    const char *before = driver_environment_given();
    for (unsigned i = 0; i < count; i++) {
        strcat(list, i ? "," : "");
        strcat(list, control_uuid(chosen[i]));
    }
    given = before ? strdup(before) : NULL;
    setenv(VISIBLE, list, 1);
    set_variable *set_there = (set_variable *)elsewhere("setenv", (void *)&setenv);
    if (set_there)
        set_there(VISIBLE, list, 1);
}

void driver_environment_restore(void) {
    set_variable *set_there = (set_variable *)elsewhere("setenv", (void *)&setenv);
    remove_variable *remove_there = (remove_variable *)elsewhere("unsetenv", (void *)&unsetenv);
    if (given) {
        setenv(VISIBLE, given, 1);
        if (set_there)
            set_there(VISIBLE, given, 1);
    } else {
        unsetenv(VISIBLE);
        if (remove_there)
            remove_there(VISIBLE);
    }
    free(given);
    given = NULL;
}
