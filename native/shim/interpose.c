/* How programs find the driver's functions, and how each way leads to the hooks:
 *   linked against libcuda       the dynamic linker finds this library's exports first;
 *   dlopen + dlsym, or dlvsym    both are exported here, and return the hook's address;
 *   cuGetProcAddress             is a hook itself, and replaces the addresses of hooked functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>

#include "proxy/proxy.h"
#include "resolve_driver.h"
#include "text.h"

#define EXPORT __attribute__((visibility("default")))

/* RTLD_NEXT, RTLD_DEFAULT, $ORIGIN and RUNPATH depend on the caller's address. So the original must find the program's
 * address on the stack: it is jumped to, not called. */
#define JUMP __attribute__((musttail)) return

static const struct {
    const char *name, *base;
    void *hook; /* NULL = only called */
    uint8_t length;
    bool cuda, per_thread;
    int since;
} functions[FUNCTIONS] = {
#define CUDA_HOOK(role, name, base, since, per_thread) \
    {#name, #base, (void *)&name, sizeof #name - 1, true, per_thread, since},
#define CUDA_USE(name) {#name, "", NULL, sizeof #name - 1, true, false, 0},
#define NVML_HOOK(name) {#name, "", (void *)&name, sizeof #name - 1, false, false, 0},
#define NVML_USE(name) {#name, "", NULL, sizeof #name - 1, false, false, 0},
#include "hooks.h"
};

/* The hook of that name, or FUNCTIONS. The first test rejects nearly all names that programs look up. */
static enum function find_hook(const char *name) {
    bool cuda = name && name[0] == 'c' && name[1] == 'u';
    if (!cuda &&
        !(name && (text_begins(name, "nvmlD") || text_begins(name, "nvmlInt") || text_begins(name, "nvmlSystemGetT"))))
        return FUNCTIONS;
    size_t length = text_length(name);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].length == length && functions[f].hook && text_equal(functions[f].name, name))
            return f;
    return FUNCTIONS;
}

void *fenka_driver_function(void *driver, const char *name) { return dl_original_ready()->dlsym(driver, name); }

void *fenka_proxy_target(void *driver, const char *name) {
    void *real = fenka_driver_function(driver, name);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (text_equal(functions[f].name, name)) {
            resolve_store(f, real);
            resolve_set_proxied(f);
            return real && functions[f].hook ? functions[f].hook : real;
        }
    return real;
}

/* `address`: the original's answer. A handle that stands for the whole program finds our export, or nothing; then the
 * question is whether the driver is loaded at all. */
static void *replace(enum function function, void *handle, void *address) {
    bool whole_program = handle == RTLD_DEFAULT || handle == RTLD_NEXT || resolve_is_hook(address);
    if (!whole_program) {
        if (!address)
            return NULL;
        resolve_adopt(function, handle);
        return functions[function].hook;
    }
    if (resolve_cached(function))
        return functions[function].hook;
    return resolve_next(functions[function].name); /* NULL, and sets dlerror */
}

EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    const struct dl_functions *original = dl_original_ready();
    enum function f = find_hook(name);
    if (f == FUNCTIONS)
        JUMP original->dlsym(handle, name);
    return replace(f, handle, original->dlsym(handle, name));
}

EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    const struct dl_functions *original = dl_original_ready();
    if (!original->dlvsym)
        return NULL;
    enum function f = find_hook(name);
    if (f == FUNCTIONS)
        JUMP original->dlvsym(handle, name, version);
    return replace(f, handle, original->dlvsym(handle, name, version));
}

/* With RTLD_DEEPBIND a library would find the driver's functions before the hooks. */
EXPORT void *dlopen(const char *file, int mode) { JUMP dl_original_ready()->dlopen(file, mode & ~RTLD_DEEPBIND); }

EXPORT void *dlmopen(Lmid_t space, const char *file, int mode) {
    const struct dl_functions *original = dl_original_ready();
    if (!original->dlmopen)
        return NULL;
    JUMP original->dlmopen(space, file, mode & ~RTLD_DEEPBIND);
}

/* The hook of the newest version that the program's version allows, by the rules of the driver's own table. */
static enum function find_versioned(const char *symbol, int version, bool per_thread) {
    enum function best = FUNCTIONS;
    for (enum function f = 0; f < FUNCTIONS; f++) {
        if (!functions[f].hook || !functions[f].cuda)
            continue;
        if (text_equal(functions[f].name, symbol) && !text_equal(functions[f].base, symbol))
            best = f;
        else if (text_equal(functions[f].base, symbol) && functions[f].since <= version &&
                 (!functions[f].per_thread || per_thread))
            best = f;
    }
    return best;
}

/* By address first, which settles version and per-thread variant. By name if the driver returns an address that no
 * symbol has. */
static void *substitute(const char *symbol, void *real, int version, cuuint64_t flags) {
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].hook && (resolve_table[f] == real || functions[f].hook == real))
            return functions[f].hook;
    enum function best = find_versioned(symbol, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    if (best == FUNCTIONS)
        return real;
    resolve_store(best, real);
    return functions[best].hook;
}

static CUresult get_proc_address_end(CUresult result, const char *symbol, void **function, int version,
                                     cuuint64_t flags) {
    if (result == CUDA_SUCCESS && function && *function)
        *function = substitute(symbol, *function, version, flags);
    return result;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    CUresult result = REAL(cuGetProcAddress)(symbol, function, version, flags);
    return get_proc_address_end(result, symbol, function, version, flags);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, function, version, flags, status);
    return get_proc_address_end(result, symbol, function, version, flags);
}
