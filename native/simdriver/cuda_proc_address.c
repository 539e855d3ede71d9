/* cuGetProcAddress: finds a function by its name and the CUDA version that the program expects. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

struct entry {
    const char *name;
    int version;
    void *function, *per_thread;
};
#include "cuda_entries.inc"

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    if (!symbol || !function)
        return CUDA_ERROR_INVALID_VALUE;
    version = driver_version_of(version);
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = NULL;
    for (size_t i = 0; i < sizeof versioned / sizeof *versioned && !*function; i++) {
        if (strcmp(versioned[i].name, symbol) != 0)
            continue;
        found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (versioned[i].version <= version) /* the newest comes first */
            *function = per_thread ? versioned[i].per_thread : versioned[i].function;
    }
    for (size_t i = 0; i < sizeof exact / sizeof *exact && found == 1 && !*function; i++)
        if (strcmp(exact[i].name, symbol) == 0)
            *function = exact[i].function;
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : found;
    return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* The CUDA runtime gets its primary context from a private table of the driver, past all exported functions. Programs
 * that test what comes of that get one from this table, which is no table of NVIDIA's. */
static const struct {
    size_t bytes;
    CUresult (*retain)(CUcontext *context, CUdevice device);
    CUresult (*release)(CUdevice device);
} private_contexts = {sizeof private_contexts, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease_v2};

/* The CUDA runtime recognises NVIDIA's driver by its private tables. This driver has none. The runtime then says that the
 * driver is too old, so the reason is given here. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    if (!table || !id)
        return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(id->bytes, "fenka's contexts", sizeof id->bytes) == 0) {
        *table = &private_contexts;
        return CUDA_SUCCESS;
    }
    static bool said;
    if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
        fputs("fenka: these cards are simulated: frameworks on the CUDA runtime, such as PyTorch and CuPy, need a real "
              "card\n",
              stderr);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
