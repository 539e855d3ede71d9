/* How programs come by the driver's functions, and how each way leads to ours:
 *   linked against libcuda       the dynamic linker finds the functions that this library exports first;
 *   dlopen + dlsym, or dlvsym    both are exported here; a name of ours gets our address;
 *   cuGetProcAddress             one of the hooks; an address of a replaced function is replaced. */
#define _GNU_SOURCE
#include "resolve.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>

#include "next_symbol.h"
#include "proxy/proxy.h"
#include "text.h"

#define EXPORT __attribute__((visibility("default")))

/* The caller's address must be on the stack as its own: RTLD_NEXT, RTLD_DEFAULT, $ORIGIN and RUNPATH are
 * taken from it. So whatever is not ours is jumped to, not called. */
#define JUMP __attribute__((musttail)) return

enum family { CUDA, NVML };

static const struct {
    const char *name, *base;
    void *ours; /* NULL = only called */
    uint8_t length, family, per_thread;
    int since;
} functions[FUNCTIONS] = {
#define CUDA_HOOK(role, name, base, since, per_thread) \
    {#name, #base, (void *)&name, sizeof #name - 1, CUDA, per_thread, since},
#define CUDA_USE(name) {#name, "", NULL, sizeof #name - 1, CUDA, 0, 0},
#define NVML_HOOK(name) {#name, "", (void *)&name, sizeof #name - 1, NVML, 0, 0},
#define NVML_USE(name) {#name, "", NULL, sizeof #name - 1, NVML, 0, 0},
#include "hooks.h"
};

static const char *const libraries[] = {[CUDA] = "libcuda.so.1", [NVML] = "libnvidia-ml.so.1"};

void *resolve_table[FUNCTIONS];

static struct {
    void *(*dlsym)(void *restrict, const char *restrict);
    void *(*dlvsym)(void *restrict, const char *restrict, const char *restrict);
    void *(*dlopen)(const char *, int);
    void *(*dlmopen)(Lmid_t, const char *, int);
} original;

/* Also called by the first who needs it: another library's constructor may run before ours. */
__attribute__((constructor)) static void find_originals(void) {
    original.dlsym = (__typeof__(original.dlsym))next_symbol("dlsym");
    original.dlvsym = (__typeof__(original.dlvsym))next_symbol("dlvsym");
    original.dlopen = (__typeof__(original.dlopen))next_symbol("dlopen");
    original.dlmopen = (__typeof__(original.dlmopen))next_symbol("dlmopen");
}

CUresult resolve_no_cuda(void) {
    return CUDA_ERROR_NOT_FOUND;
}

nvmlReturn_t resolve_no_nvml(void) {
    return NVML_ERROR_FUNCTION_NOT_FOUND;
}

/* Our function of that name, or FUNCTIONS. Nearly all names that programs look up end at the first test. */
static enum function named(const char *name) {
    bool cuda = name && name[0] == 'c' && name[1] == 'u';
    if (!cuda && !(name && (text_begins(name, "nvmlD") || text_begins(name, "nvmlInt"))))
        return FUNCTIONS;
    size_t length = text_length(name);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].length == length && functions[f].ours && text_equal(functions[f].name, name))
            return f;
    return FUNCTIONS;
}

static bool is_ours(void *address) {
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (address && functions[f].ours == address)
            return true;
    return false;
}

static void remember(enum function f, void *real) {
    void *none = NULL;
    if (real && !is_ours(real))
        __atomic_compare_exchange_n(&resolve_table[f], &none, real, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* A proxy stands under the driver's name and has handed over what is behind it: the driver is not looked for
 * by name any more, for that name is the proxy. */
static bool behind_proxy[2];
static const char *const proxy_exports[] = {[CUDA] = "fenka_cuda_driver", [NVML] = "fenka_nvml_driver"};

static bool is_behind_proxy(enum function f) {
    return __atomic_load_n(&behind_proxy[functions[f].family], __ATOMIC_ACQUIRE);
}

/* Takes all functions of the family from where one was found. A proxy is looked through, also one of another
 * namespace, or each call would be charged here and once more there. The library must stay loaded from now on, for
 * our functions go on calling it. No lock: dlsym runs inside the dynamic linker's own. */
static void adopt(enum function found, void *handle) {
    Dl_info info;
    if (__atomic_load_n(&resolve_table[found], __ATOMIC_RELAXED) || is_behind_proxy(found))
        return;
    proxy_driver *proxied = (proxy_driver *)original.dlsym(handle, proxy_exports[functions[found].family]);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].family == functions[found].family)
            remember(f, proxied ? proxied(functions[f].name) : original.dlsym(handle, functions[f].name));
    if (resolve_table[found] && dladdr(resolve_table[found], &info))
        original.dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    dlerror(); /* what was not found here is no failure of what the program asked for */
}

void *fenka_driver_function(void *driver, const char *name) {
    if (!original.dlsym)
        find_originals();
    return original.dlsym(driver, name);
}

void *fenka_proxy_target(void *driver, const char *name) {
    void *real = fenka_driver_function(driver, name);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (text_equal(functions[f].name, name)) {
            remember(f, real);
            __atomic_store_n(&behind_proxy[functions[f].family], true, __ATOMIC_RELEASE);
            return real && functions[f].ours ? functions[f].ours : real;
        }
    return real;
}

/* What follows this library in the program's search order. Not as a last call: jumped to, the original would
 * take our caller for its own. */
static void *next_after_us(const char *name) {
    void *found = original.dlsym(RTLD_NEXT, name);
    __asm__ volatile("" : "+r"(found));
    return found;
}

void *resolve(enum function f) {
    if (!original.dlsym)
        find_originals();
    if (is_behind_proxy(f))
        return __atomic_load_n(&resolve_table[f], __ATOMIC_ACQUIRE);
    void *handle = original.dlopen(libraries[functions[f].family], RTLD_LAZY | RTLD_NOLOAD);
    if (handle) {
        adopt(f, handle);
        dlclose(handle);
    } else if (next_after_us(functions[f].name))
        adopt(f, RTLD_NEXT);
    return __atomic_load_n(&resolve_table[f], __ATOMIC_ACQUIRE);
}

/* `found` is what the original answered. The program's own handle finds our export, or nothing, where it
 * stands for the whole program; whether the driver is loaded at all is then the question. */
static void *replace(enum function f, void *handle, void *found) {
    bool whole_program = handle == RTLD_DEFAULT || handle == RTLD_NEXT || is_ours(found);
    if (!whole_program) {
        if (!found)
            return NULL;
        adopt(f, handle);
        return functions[f].ours;
    }
    if (resolve_cached(f))
        return functions[f].ours;
    return next_after_us(functions[f].name); /* NULL, and dlerror says so */
}

EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    if (!original.dlsym)
        find_originals();
    enum function f = named(name);
    if (f == FUNCTIONS)
        JUMP original.dlsym(handle, name);
    return replace(f, handle, original.dlsym(handle, name));
}

EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    if (!original.dlvsym)
        find_originals();
    if (!original.dlvsym)
        return NULL;
    enum function f = named(name);
    if (f == FUNCTIONS)
        JUMP original.dlvsym(handle, name, version);
    return replace(f, handle, original.dlvsym(handle, name, version));
}

/* A library loaded with RTLD_DEEPBIND would find the driver's functions before ours. */
EXPORT void *dlopen(const char *file, int mode) {
    if (!original.dlopen)
        find_originals();
    JUMP original.dlopen(file, mode & ~RTLD_DEEPBIND);
}

EXPORT void *dlmopen(Lmid_t space, const char *file, int mode) {
    if (!original.dlmopen)
        find_originals();
    if (!original.dlmopen)
        return NULL;
    JUMP original.dlmopen(space, file, mode & ~RTLD_DEEPBIND);
}

/* By address first: that answers all questions of versions and per-thread streams. Drivers may also hand out
 * an address that no symbol has; then by name, as the driver's own table is keyed. */
static void *substitute(const char *symbol, void *real, int version, cuuint64_t flags) {
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    enum function best = FUNCTIONS;
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].ours && (resolve_table[f] == real || functions[f].ours == real))
            return functions[f].ours;
    for (enum function f = 0; f < FUNCTIONS; f++) {
        if (!functions[f].ours || functions[f].family != CUDA)
            continue;
        if (text_equal(functions[f].name, symbol) && !text_equal(functions[f].base, symbol))
            best = f;
        else if (text_equal(functions[f].base, symbol) && functions[f].since <= version &&
                 (!functions[f].per_thread || per_thread))
            best = f;
    }
    if (best == FUNCTIONS)
        return real;
    remember(best, real);
    return functions[best].ours;
}

static CUresult substituted(CUresult result, const char *symbol, void **function, int version, cuuint64_t flags) {
    if (result == CUDA_SUCCESS && function && *function)
        *function = substitute(symbol, *function, version, flags);
    return result;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    CUresult result = REAL(cuGetProcAddress)(symbol, function, version, flags);
    return substituted(result, symbol, function, version, flags);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, function, version, flags, status);
    return substituted(result, symbol, function, version, flags);
}
