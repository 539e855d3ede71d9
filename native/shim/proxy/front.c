/* A proxy: stands where the driver's library is expected and jumps, name by name, to the shim or to the driver.
 *
 * Compiled once as libcuda.so.1 and once as libnvidia-ml.so.1. Neither holds a hook: both need libfenka.so, which
 * the dynamic linker loads once per namespace however it is asked for (preloaded, needed by one, by both). So there
 * is one account slot and one table of what is held, and no second copy to keep from charging again.
 *
 * The driver is where ld.so finds it for `behind` (see the Makefile), which needs it, if it is there, as DT_AUXILIARY:
 * this puts the driver into the search order of whoever uses the proxy, after the proxy. A name that was not known
 * when the proxy was built is then found in the driver itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proxy.h"

/* From the Makefile: LIBRARY; EXPORTED and PLACED (see proxy.h, behind.c); ABSENT, the answer of a function that
 * the driver lacks; MISSING, of all without a driver. */
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define IN_LEASE "/run/fenka/driver/" LIBRARY

/* Of `behind`; begins so as long as nobody has written over it. */
#define NOWHERE "/nowhere/"
extern const char PLACED[];

/* Generated. */
extern void *proxy_targets[];
extern const char *const proxy_names[];
extern const size_t proxy_count;

static void *driver;

static int absent(void) {
    return ABSENT;
}

static int missing(void) {
    return MISSING;
}

static void say(const char *fault, const char *detail) {
    char line[8448];
    int length = snprintf(line, sizeof line, "fenka: no GPU for this process: %s%s\n", fault, detail);
    ssize_t ignored = write(STDERR_FILENO, line, (size_t)length);
    (void)ignored;
}

/* A proxy is no driver: neither this one, reached by a link, nor another copy of it. */
static void *open_driver(const char *path) {
    void *found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (found && fenka_driver_function(found, TEXT(EXPORTED))) {
        say(path, " is a proxy, not the driver");
        dlclose(found);
        return NULL;
    }
    return found;
}

/* Before any constructor of those that need this library, and after the driver's own. */
__attribute__((constructor)) static void fill(void) {
    driver = open_driver(IN_LEASE);
    if (!driver)
        driver = open_driver(PLACED);
    if (!driver)
        say("its driver is missing: neither " IN_LEASE " can be loaded, nor ",
            strncmp(PLACED, NOWHERE, sizeof NOWHERE - 1) ? PLACED : "is another place written into the proxy");
    for (size_t i = 0; i < proxy_count; i++) {
        void *target = driver ? fenka_proxy_target(driver, proxy_names[i]) : (void *)missing;
        proxy_targets[i] = target ? target : (void *)absent;
    }
    dlerror(); /* what was not found here is no failure of the program's dlopen */
}

PROXY_EXPORT proxy_driver EXPORTED;

void *EXPORTED(const char *name) {
    return driver ? fenka_driver_function(driver, name) : NULL;
}
