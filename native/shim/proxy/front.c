/* A proxy: has the name of the driver's library and jumps, function by function, to the shim or to the driver.
 *
 * Compiled once as libcuda.so.1 and once as libnvidia-ml.so.1. Neither contains a hook: both need libfenka.so, which the
 * dynamic linker loads once per namespace, whether it is preloaded or needed. So there is one account slot and one table
 * of allocations, and nothing is charged twice.
 *
 * The `next` library (see the Makefile) names the driver as DT_AUXILIARY. If the driver is there, this puts it behind
 * the proxy in the program's search order, so that functions that were unknown when the proxy was built are found in
 * the driver itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proxy.h"

/* From the Makefile: LIBRARY; EXPORTED and PLACED (see proxy.h, next.c); ABSENT, the answer of a function that
 * the driver lacks; MISSING, the answer of all functions without a driver. */
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define IN_LEASE "/run/fenka/driver/" LIBRARY

/* In the `next` library; starts with this until a path is written over it. */
#define NOWHERE "/nowhere/"
extern const char PLACED[];

/* Generated. */
extern void *proxy_targets[];
extern const char *const proxy_names[];
extern const size_t proxy_count;

static void *driver;

static int absent(void) { return ABSENT; }

static int missing(void) { return MISSING; }

static void say(const char *fault, const char *detail) {
    char line[8448];
    int length = snprintf(line, sizeof line, "fenka: no GPU for this process: %s%s\n", fault, detail);
    ssize_t ignored = write(STDERR_FILENO, line, (size_t)length);
    (void)ignored;
}

/* Refuses proxies: this one, reached by a link, or another copy of it. */
static void *open_driver(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle && fenka_driver_function(handle, TEXT(EXPORTED))) {
        say(path, " is a proxy, not the driver");
        dlclose(handle);
        return NULL;
    }
    return handle;
}

/* Runs after the driver's constructors, and before those of libraries that need this one. */
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
    dlerror(); /* functions that are missing here are no failure of the program's dlopen */
}

PROXY_EXPORT proxy_driver EXPORTED;

void *EXPORTED(const char *name) { return driver ? fenka_driver_function(driver, name) : NULL; }
