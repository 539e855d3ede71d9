#define _GNU_SOURCE
#include "resolve_driver.h"

#include <stdint.h>

#include "next_symbol.h"
#include "proxy/proxy.h"

enum family { CUDA, NVML };

static const struct {
    const char *name;
    uint8_t family;
} functions[FUNCTIONS] = {
#define CUDA_HOOK(role, name, base, since, per_thread) {#name, CUDA},
#define CUDA_USE(name) {#name, CUDA},
#define NVML_HOOK(name) {#name, NVML},
#define NVML_USE(name) {#name, NVML},
#include "hooks.h"
};

static const struct {
    const char *library, *proxy_export;
} drivers[] = {
    [CUDA] = {"libcuda.so.1", "fenka_cuda_driver"},
    [NVML] = {"libnvidia-ml.so.1", "fenka_nvml_driver"},
};

void *resolve_table[FUNCTIONS];
struct dl_functions dl_original;

__attribute__((constructor)) void dl_find_original(void) {
    dl_original.dlsym = (__typeof__(dl_original.dlsym))next_symbol("dlsym");
    dl_original.dlvsym = (__typeof__(dl_original.dlvsym))next_symbol("dlvsym");
    dl_original.dlopen = (__typeof__(dl_original.dlopen))next_symbol("dlopen");
    dl_original.dlmopen = (__typeof__(dl_original.dlmopen))next_symbol("dlmopen");
}

CUresult resolve_no_cuda(void) { return CUDA_ERROR_NOT_FOUND; }

nvmlReturn_t resolve_no_nvml(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }

/* Set by the linker: where this library begins and ends. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

bool resolve_is_hook(const void *address) {
    return (uintptr_t)address - (uintptr_t)__ehdr_start < (uintptr_t)_end - (uintptr_t)__ehdr_start;
}

void resolve_store(enum function function, void *real) {
    void *none = NULL;
    if (real && !resolve_is_hook(real))
        __atomic_compare_exchange_n(&resolve_table[function], &none, real, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* A proxy has the driver's name and has handed over the driver's functions. So the driver is no longer searched by
 * name, which would find the proxy. */
static bool proxied[2];

static bool is_proxied(enum function function) {
    return __atomic_load_n(&proxied[functions[function].family], __ATOMIC_ACQUIRE);
}

void resolve_set_proxied(enum function function) {
    __atomic_store_n(&proxied[functions[function].family], true, __ATOMIC_RELEASE);
}

/* If the handle is a proxy, possibly in another linker namespace, its driver is used; otherwise each call would be
 * charged once there and once here. The library stays loaded from now on, because hooks go on calling it. There is no
 * lock: dlsym runs inside the dynamic linker's own. */
void resolve_adopt(enum function found, void *handle) {
    Dl_info info;
    if (__atomic_load_n(&resolve_table[found], __ATOMIC_RELAXED) || is_proxied(found))
        return;
    uint8_t family = functions[found].family;
    proxy_driver *proxy = (proxy_driver *)dl_original.dlsym(handle, drivers[family].proxy_export);
    for (enum function f = 0; f < FUNCTIONS; f++)
        if (functions[f].family == family)
            resolve_store(f, proxy ? proxy(functions[f].name) : dl_original.dlsym(handle, functions[f].name));
    if (resolve_table[found] && dladdr(resolve_table[found], &info))
        dl_original.dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    dlerror(); /* functions that are missing here are no failure of the program's call */
}

/* Not a tail call: jumped to, the original would take this function's caller for its own. */
void *resolve_next(const char *name) {
    void *address = dl_original.dlsym(RTLD_NEXT, name);
    __asm__ volatile("" : "+r"(address));
    return address;
}

void *resolve(enum function function) {
    dl_original_ready();
    if (is_proxied(function))
        return __atomic_load_n(&resolve_table[function], __ATOMIC_ACQUIRE);
    void *handle = dl_original.dlopen(drivers[functions[function].family].library, RTLD_LAZY | RTLD_NOLOAD);
    if (handle) {
        resolve_adopt(function, handle);
        dlclose(handle);
    } else if (resolve_next(functions[function].name))
        resolve_adopt(function, RTLD_NEXT);
    return __atomic_load_n(&resolve_table[function], __ATOMIC_ACQUIRE);
}
