/* The driver's own functions, as the program has loaded them. */
#ifndef FENKA_RESOLVE_H
#define FENKA_RESOLVE_H
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>

/* Every version of every function is declared under its own name; the hooks among them are exported. */
#include "newer_driver.h"
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
/* In no header: see nvml_export_table.c. */
nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);
#pragma GCC visibility pop

void fenka_simulated_nvml(void);

enum function {
#define CUDA_HOOK(role, name, base, since, per_thread) FUNCTION_##name,
#define CUDA_USE(name) FUNCTION_##name,
#define NVML_HOOK(name) FUNCTION_##name,
#define NVML_USE(name) FUNCTION_##name,
#include "hooks.h"
    FUNCTIONS
};

extern void *resolve_table[FUNCTIONS]; /* the driver's functions; NULL = not resolved */

/* Looks in the driver that the program has loaded. NULL = no driver is loaded, or it lacks the function. */
void *resolve(enum function function);

/* The answers of functions that the driver lacks. */
CUresult resolve_no_cuda(void);
nvmlReturn_t resolve_no_nvml(void);

static inline void *resolve_cached(enum function function) {
    void *real = __atomic_load_n(&resolve_table[function], __ATOMIC_RELAXED);
    return __builtin_expect(real != NULL, 1) ? real : resolve(function);
}

static inline void *resolve_or(enum function function, void *otherwise) {
    void *real = resolve_cached(function);
    return __builtin_expect(real != NULL, 1) ? real : otherwise;
}

#define HAS(name) (resolve_cached(FUNCTION_##name) != NULL)
#define REAL(name) ((__typeof__(&name))resolve_or(FUNCTION_##name, (void *)&resolve_no_cuda))
#define REAL_NVML(name) ((__typeof__(&name))resolve_or(FUNCTION_##name, (void *)&resolve_no_nvml))
#endif
