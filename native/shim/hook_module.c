/* Loaded code. A module is loaded into the current context and dies with it. A library is loaded into every context of
 * the process, including later ones. Neither call reports how much memory that takes, so module_size.h computes it. */
#include "charge.h"
#include "context_charge.h"
#include "module_size.h"
#include "os.h"

/* By default, drivers from CUDA 12.2 on load a kernel when it is first used. */
static bool loads_lazily(void) {
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return HAS(cuModuleGetLoadingMode) && REAL(cuModuleGetLoadingMode)(&mode) == CUDA_SUCCESS &&
           mode == CU_MODULE_LAZY_LOADING;
}

static uint64_t bytes_of(const void *image) {
    return image ? module_size(image, MODULE_SIZE_UNBOUNDED, loads_lazily()) : 0;
}

/* 0 if the file cannot be read; then the driver reports the error. */
static uint64_t bytes_in(const char *path) {
    void *content;
    size_t size;
    if (!path || os_map_file(path, &size, &content) != OS_OK)
        return 0;
    uint64_t bytes = module_size(content, size, loads_lazily());
    os_unmap(content, size);
    return bytes;
}

#define LOAD_MODULE(needed, call)                                                                 \
    do {                                                                                          \
        struct target target_;                                                                    \
        uint64_t bytes_ = (needed);                                                               \
        CHARGE_OR_RETURN(&target_, target_current(&target_), bytes_);                             \
        CUresult result_ = (call);                                                                \
        return charge_commit(result_, &target_, bytes_, MODULE, result_ ? 0 : (uint64_t)*module); \
    } while (0)

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    LOAD_MODULE(bytes_in(path), REAL(cuModuleLoad)(module, path));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    LOAD_MODULE(bytes_of(image), REAL(cuModuleLoadData)(module, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                            void **values) {
    LOAD_MODULE(bytes_of(image), REAL(cuModuleLoadDataEx)(module, image, count, options, values));
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    LOAD_MODULE(bytes_of(image), REAL(cuModuleLoadFatBinary)(module, image));
}

CUresult cuModuleUnload(CUmodule module) {
    struct allocation allocation;
    bool ours = free_begin(MODULE, (uint64_t)module, &allocation);
    return free_end(REAL(cuModuleUnload)(module), ours, &allocation);
}

static CUresult load_library_end(CUresult result, CUlibrary *library, uint64_t bytes) {
    struct target everywhere = {.card = NO_CARD};
    struct allocation stale;
    if (result != CUDA_SUCCESS) {
        context_discharge_code(bytes);
        return result;
    }
    if (allocations_take(LIBRARY, (uint64_t)*library, &stale))
        context_discharge_code(stale.bytes);
    return charge_commit(result, &everywhere, bytes, LIBRARY, (uint64_t)*library);
}

#define LOAD_LIBRARY(needed, call)                                              \
    do {                                                                        \
        uint64_t bytes_ = (needed);                                             \
        CUresult refusal_ = context_charge_code(bytes_);                        \
        return refusal_ ? refusal_ : load_library_end((call), library, bytes_); \
    } while (0)

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values,
                           unsigned int count, CUlibraryOption *library_options, void **library_values,
                           unsigned int library_count) {
    LOAD_LIBRARY(bytes_of(image), REAL(cuLibraryLoadData)(library, image, options, values, count, library_options,
                                                          library_values, library_count));
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values,
                               unsigned int count, CUlibraryOption *library_options, void **library_values,
                               unsigned int library_count) {
    LOAD_LIBRARY(bytes_in(path), REAL(cuLibraryLoadFromFile)(library, path, options, values, count, library_options,
                                                             library_values, library_count));
}

CUresult cuLibraryUnload(CUlibrary library) {
    struct allocation allocation;
    bool ours = free_begin(LIBRARY, (uint64_t)library, &allocation);
    CUresult result = free_end(REAL(cuLibraryUnload)(library), ours, &allocation);
    if (result == CUDA_SUCCESS && ours)
        context_discharge_code(allocation.bytes);
    return result;
}
