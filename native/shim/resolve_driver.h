/* How interpose.c hands over what it learns of the driver. */
#ifndef FENKA_RESOLVE_DRIVER_H
#define FENKA_RESOLVE_DRIVER_H
#include "resolve.h"

/* The dynamic linker's functions that this library hides. */
struct dl_functions {
    void *(*dlsym)(void *restrict, const char *restrict);
    void *(*dlvsym)(void *restrict, const char *restrict, const char *restrict); /* NULL = there is none */
    void *(*dlopen)(const char *, int);
    void *(*dlmopen)(long, const char *, int); /* NULL = there is none */
};

extern struct dl_functions dl_original;
void dl_find_original(void);

/* Found on the first use: another library's constructor may run before this library's. */
static inline const struct dl_functions *dl_original_ready(void) {
    if (!dl_original.dlsym)
        dl_find_original();
    return &dl_original;
}

/* Whether the address lies in this library. */
bool resolve_is_hook(const void *address);

/* Stores the driver's function, unless there is one or `real` is a hook. */
void resolve_store(enum function function, void *real);

/* The function was found by `handle`: stores all functions of the same driver. */
void resolve_adopt(enum function found, void *handle);

/* From now on a proxy names the functions of this driver (resolve_store), and none are searched. */
void resolve_set_proxied(enum function function);

/* Looks behind this library in the program's search order. */
void *resolve_next(const char *name);
#endif
