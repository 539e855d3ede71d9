/* Modules, libraries and the functions in them. Code is not run: a function is only its name, which may contain a
 * duration: `anything_us2000` takes 2000 microseconds. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_memory.h"
#include "driver.h"
#include "image_size.h"

#define DEFAULT_KERNEL_US 50

struct CUmod_st {
    struct object object;
    bool text; /* PTX, which must contain the names of functions */
    char *source;
    pthread_mutex_t lock;
    struct CUfunc_st *functions;
    uint64_t bytes;
    struct image_variable *variables;
    /* A module: its context's card. A library: all cards on which a context needed it. */
    bool on_card[FENKA_NODE_CARDS];
    struct CUmod_st *next, **place;
};

/* All loaded modules and libraries. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUmodule loaded;

void modules_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (CUmodule module = loaded, next; module; module = next) {
        next = module->next;
        memset(module->on_card, 0, sizeof module->on_card);
        module->next = NULL;
        module->place = &module->next;
    }
    loaded = NULL;
}

static CUresult load_on(CUmodule module, uint32_t card) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!module->on_card[card] && !sim_memory_charge(card, module->bytes))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else
        module->on_card[card] = true;
    pthread_mutex_unlock(&lock);
    return result;
}

/* A library is loaded on the current context's card. */
static CUresult load_here(CUmodule library) {
    CUcontext context;
    return context_current(&context) == CUDA_SUCCESS ? load_on(library, context->card) : CUDA_SUCCESS;
}

/* Under the lock. */
static void leave(CUmodule module, uint32_t card) {
    if (module->on_card[card])
        sim_memory_release(card, module->bytes);
    module->on_card[card] = false;
}

void modules_drop(CUcontext context, bool last_on_card) {
    pthread_mutex_lock(&lock);
    for (CUmodule module = loaded; module; module = module->next)
        if (module->object.context ? module->object.context == context : last_on_card)
            leave(module, context->card);
    pthread_mutex_unlock(&lock);
}

static uint64_t duration_of(const char *name) {
    unsigned long us = environment_number("FENKA_SIMULATED_KERNEL_US", DEFAULT_KERNEL_US);
    for (const char *at = strstr(name, "_us"); at; at = strstr(at + 1, "_us")) {
        char *end;
        unsigned long suffix = strtoul(at + 3, &end, 10);
        if (end != at + 3 && *end == '\0' && suffix <= UINT_MAX)
            us = suffix;
    }
    return (uint64_t)us * 1000;
}

static CUresult load(CUmodule *module, const void *image, size_t size, CUcontext context) {
    if (!module || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (*(const char *)image == '\0')
        return CUDA_ERROR_INVALID_IMAGE;
    CUmodule made = object_new(MODULE, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool elf = memcmp(image, "\177ELF", 4) == 0, fat = memcmp(image, "\x50\xed\x55\xba", 4) == 0;
    made->text = !elf && !fat && strstr(image, ".version") && strstr(image, ".entry");
    made->source = made->text ? strdup(image) : NULL;
    pthread_mutex_init(&made->lock, NULL);
    made->bytes = sim_memory_taken(image_size(image, size, &made->variables));
    CUresult result = context ? load_on(made, context->card) : load_here(made);
    if (result != CUDA_SUCCESS) {
        free(made->source);
        image_variables_free(made->variables);
        object_delete(made);
        return result;
    }
    pthread_mutex_lock(&lock);
    made->next = loaded;
    made->place = &loaded;
    if (loaded)
        loaded->place = &made->next;
    loaded = made;
    pthread_mutex_unlock(&lock);
    *module = made;
    return CUDA_SUCCESS;
}

static void unload(CUmodule module) {
    for (struct CUfunc_st *function = module->functions, *next; function; function = next) {
        next = function->sibling;
        object_delete(function);
    }
    pthread_mutex_lock(&lock);
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++)
        leave(module, card);
    *module->place = module->next;
    if (module->next)
        module->next->place = module->place;
    pthread_mutex_unlock(&lock);
    free(module->source);
    image_variables_free(module->variables);
    module->source = NULL;
    module->variables = NULL;
    module->functions = NULL;
    object_delete(module);
}

static CUresult function_in(CUmodule module, const char *name, struct CUfunc_st **out) {
    if (!out || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    if (module->text && !strstr(module->source, name))
        return CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&module->lock);
    struct CUfunc_st *function = module->functions;
    while (function && strncmp(function->name, name, sizeof function->name - 1) != 0)
        function = function->sibling;
    if (!function && (function = object_new(FUNCTION, sizeof *function, module->object.context))) {
        snprintf(function->name, sizeof function->name, "%s", name);
        function->module = module;
        function->duration_ns = duration_of(name);
        function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
        function->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
        function->sibling = module->functions;
        module->functions = function;
    }
    pthread_mutex_unlock(&module->lock);
    *out = function;
    return function ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult function_resolve(const void *handle, struct CUfunc_st **function) {
    *function = object_get(handle, FUNCTION);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- modules ---- */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CUcontext context;
    TRY(context_current(&context));
    return load(module, image, SIZE_MAX, context);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                            void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }

static CUresult load_file(CUmodule *module, const char *path, CUcontext context) {
    if (!path)
        return CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "rb");
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    char *image = NULL;
    size_t size = 0;
    ssize_t got = getdelim(&image, &size, EOF, file); /* the whole file, NUL-terminated */
    fclose(file);
    CUresult result = got > 4 ? load(module, image, (size_t)got, context) : CUDA_ERROR_INVALID_IMAGE;
    free(image);
    return result;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    CUcontext context;
    TRY(context_current(&context));
    return load_file(module, path, context);
}

CUresult cuModuleUnload(CUmodule module) {
    TRY(driver_ready());
    if (!object_get(module, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    unload(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    TRY(driver_ready());
    return object_get(module, MODULE) ? function_in(module, name, function) : CUDA_ERROR_INVALID_HANDLE;
}

/* Only the sizes of PTX's variables are known. There is no code, so nobody writes there: the address is of no memory. */
static CUresult variable_in(CUmodule module, const char *name, CUdeviceptr *pointer, size_t *bytes) {
    TRY(driver_ready());
    if (!object_get(module, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    const struct image_variable *variable = module->variables;
    while (variable && strcmp(variable->name, name) != 0)
        variable = variable->next;
    if (!variable)
        return CUDA_ERROR_NOT_FOUND;
    if (pointer)
        *pointer = (CUdeviceptr)(uintptr_t)variable;
    if (bytes)
        *bytes = variable->bytes;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name) {
    return variable_in(module, name, pointer, bytes);
}

CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name) {
    return variable_in((CUmodule)library, name, pointer, bytes);
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

/* ---- libraries: modules that belong to no context ---- */

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count) {
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    TRY(driver_ready());
    return load((CUmodule *)library, code, SIZE_MAX, NULL);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit, void **jit_values,
                               unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count) {
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    TRY(driver_ready());
    return load_file((CUmodule *)library, path, NULL);
}

CUresult cuLibraryUnload(CUlibrary library) {
    TRY(driver_ready());
    if (!object_get(library, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    unload((CUmodule)library);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    TRY(driver_ready());
    if (!object_get(library, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(load_here((CUmodule)library));
    return function_in((CUmodule)library, name, (struct CUfunc_st **)kernel);
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    CUcontext context;
    TRY(context_current(&context));
    if (!object_get(library, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!module)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(load_on((CUmodule)library, context->card));
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    CUcontext context;
    struct CUfunc_st *known;
    TRY(context_current(&context));
    TRY(function_resolve(kernel, &known));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(load_on(known->module, context->card));
    *function = known;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) { return cuFuncGetName(name, (CUfunction)kernel); }

/* ---- functions ---- */

CUresult cuFuncGetName(const char **name, CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = function->name;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!module)
        return CUDA_ERROR_INVALID_VALUE;
    *module = function->module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!value || (unsigned)attribute >= 32)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fenka_node_card *card = &node_state->cards[device_cards[0]];
    *value = function->attributes[attribute];
    if (attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION || attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION)
        *value = (int)(card->compute_major * 10 + card->compute_minor);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if ((unsigned)attribute >= 32)
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    return cuFuncSetAttribute((CUfunction)kernel, attribute, value);
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
    struct CUfunc_st *function;
    (void)config; /* a hint */
    TRY(driver_ready());
    return function_resolve(handle, &function);
}
