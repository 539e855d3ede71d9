/* Loaded code. A module is loaded into the current context and dies with it. A library is loaded into every context of
 * the process, including later ones. Neither call reports how much memory that takes, so module_size.h
 * computes it, and the driver is asked for the size of variables afterwards: until then a module may take more than it is
 * charged for. */
#include <string.h>

#include "account.h"
#include "card_bytes.h"
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

/* NULL content: there is none, or the file cannot be opened; then the driver reports the error. `fault`: of a file whose
 * size nobody can tell, such as a pipe. The driver is not asked to read it. */
struct image {
    void *content;
    size_t size;
    CUresult fault;
};

static struct image image_of(const void *content) {
    return (struct image){(void *)(uintptr_t)content, MODULE_SIZE_UNBOUNDED, CUDA_SUCCESS};
}

static struct image image_in(const char *path) {
    struct image image = {NULL, 0, CUDA_SUCCESS};
    enum os_result result = path ? os_read_file(path, MODULE_LARGEST_FILE, &image.size, &image.content) : OS_MISSING;
    if (result != OS_OK)
        image.content = NULL;
    if (result == OS_WRONG_SIZE)
        image.fault = CUDA_ERROR_INVALID_IMAGE;
    return image;
}

static void image_close(const struct image *image) {
    if (image->content && image->size != MODULE_SIZE_UNBOUNDED)
        os_unmap(image->content, image->size);
}

static struct module_size size_of(const struct image *image, variable_size ask, void *to) {
    if (!image->content)
        return (struct module_size){0, false};
    struct module_size size = module_size(image->content, image->size, loads_lazily(), ask, to);
    size.bytes = card_bytes(size.bytes);
    return size;
}

/* ---- what has been loaded ---- */

struct loaded {
    CUmodule module;
    CUlibrary library; /* or NULL */
    bool unknown;      /* a variable has a size that neither the driver says nor the text */
};

static bool variable_of(const struct loaded *loaded, const char *name, size_t *bytes) {
    CUdeviceptr address;
    if (loaded->library)
        return HAS(cuLibraryGetGlobal) &&
               REAL(cuLibraryGetGlobal)(&address, bytes, loaded->library, name) == CUDA_SUCCESS;
    return HAS(cuModuleGetGlobal_v2) &&
           REAL(cuModuleGetGlobal_v2)(&address, bytes, loaded->module, name) == CUDA_SUCCESS;
}

/* The assembler drops variables that nothing uses; then the driver does not know them. */
static uint64_t ask_driver(void *to, const struct ptx_variable *variable) {
    struct loaded *loaded = to;
    char name[4096];
    size_t bytes = 0;
    if (variable->name_length < sizeof name) {
        memcpy(name, variable->name, variable->name_length);
        name[variable->name_length] = 0;
        if (variable_of(loaded, name, &bytes))
            return bytes > variable->bytes ? bytes : variable->bytes;
    }
    loaded->unknown |= !variable->plain;
    return variable->bytes;
}

/* Reads the image once more, now with what the driver says of its variables. CUDA_ERROR_NOT_SUPPORTED if a size remains
 * unknown. */
static CUresult measure_loaded(const struct image *image, struct loaded *loaded, uint64_t *bytes) {
    *bytes = size_of(image, ask_driver, loaded).bytes;
    return loaded->unknown ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static CUresult load_module_end(CUresult result, CUmodule *module, const struct image *image,
                                const struct target *target, struct module_size size) {
    uint64_t bytes = size.bytes;
    if (result == CUDA_SUCCESS && size.variables) {
        struct loaded loaded = {.module = *module};
        result = measure_loaded(image, &loaded, &bytes);
        if (result == CUDA_SUCCESS && bytes > size.bytes)
            result = charge(target, bytes - size.bytes);
        if (result != CUDA_SUCCESS) {
            REAL(cuModuleUnload)(*module);
            bytes = size.bytes;
        } else if (bytes < size.bytes)
            account_discharge(target->card, size.bytes - bytes);
    }
    return charge_commit(result, target, bytes, MODULE, result ? 0 : (uint64_t)*module);
}

#define LOAD_MODULE(of, call)                                                      \
    do {                                                                           \
        struct target target_;                                                     \
        struct image image_ = (of);                                                \
        struct module_size size_ = size_of(&image_, NULL, NULL);                   \
        CUresult result_ = image_.fault ? image_.fault : target_current(&target_); \
        if (result_ == CUDA_SUCCESS)                                               \
            result_ = charge(&target_, size_.bytes);                               \
        if (result_ == CUDA_SUCCESS)                                               \
            result_ = load_module_end((call), module, &image_, &target_, size_);   \
        image_close(&image_);                                                      \
        return result_;                                                            \
    } while (0)

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    LOAD_MODULE(image_in(path), REAL(cuModuleLoad)(module, path));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    LOAD_MODULE(image_of(image), REAL(cuModuleLoadData)(module, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                            void **values) {
    LOAD_MODULE(image_of(image), REAL(cuModuleLoadDataEx)(module, image, count, options, values));
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    LOAD_MODULE(image_of(image), REAL(cuModuleLoadFatBinary)(module, image));
}

CUresult cuModuleUnload(CUmodule module) {
    struct allocation allocation;
    bool ours = free_begin(MODULE, (uint64_t)module, &allocation);
    return free_end(REAL(cuModuleUnload)(module), ours, &allocation);
}

static CUresult load_library_end(CUresult result, CUlibrary *library, const struct image *image,
                                 struct module_size size) {
    struct target everywhere = {.card = NO_CARD};
    struct allocation stale;
    uint64_t bytes = size.bytes;
    if (result == CUDA_SUCCESS && size.variables) {
        struct loaded loaded = {.library = *library};
        result = measure_loaded(image, &loaded, &bytes);
        if (result == CUDA_SUCCESS && bytes > size.bytes)
            result = context_charge_code(bytes - size.bytes);
        if (result != CUDA_SUCCESS) {
            REAL(cuLibraryUnload)(*library);
            bytes = size.bytes;
        } else if (bytes < size.bytes)
            context_discharge_code(size.bytes - bytes);
    }
    if (result != CUDA_SUCCESS) {
        context_discharge_code(bytes);
        return result;
    }
    if (allocations_take(LIBRARY, (uint64_t)*library, &stale))
        context_discharge_code(stale.bytes);
    return charge_commit(result, &everywhere, bytes, LIBRARY, (uint64_t)*library);
}

#define LOAD_LIBRARY(of, call)                                                             \
    do {                                                                                   \
        struct image image_ = (of);                                                        \
        struct module_size size_ = size_of(&image_, NULL, NULL);                           \
        CUresult result_ = image_.fault ? image_.fault : context_charge_code(size_.bytes); \
        if (result_ == CUDA_SUCCESS)                                                       \
            result_ = load_library_end((call), library, &image_, size_);                   \
        image_close(&image_);                                                              \
        return result_;                                                                    \
    } while (0)

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values,
                           unsigned int count, CUlibraryOption *library_options, void **library_values,
                           unsigned int library_count) {
    LOAD_LIBRARY(image_of(image), REAL(cuLibraryLoadData)(library, image, options, values, count, library_options,
                                                          library_values, library_count));
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values,
                               unsigned int count, CUlibraryOption *library_options, void **library_values,
                               unsigned int library_count) {
    LOAD_LIBRARY(image_in(path), REAL(cuLibraryLoadFromFile)(library, path, options, values, count, library_options,
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
