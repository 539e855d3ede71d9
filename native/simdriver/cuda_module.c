/* Modules, libraries and the functions in them. Code is not run: a function is only its name, which may contain a
 * duration: `anything_us2000` takes 2000 microseconds. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_memory.h"
#include "driver.h"
#include "image_size.h"

#define DEFAULT_KERNEL_US 50
#define FENKA_VARIABLE_MAX (4ull << 30) /* bytes: this is the host's memory */
#define LARGEST_FILE ((off_t)4 << 30)

struct CUmod_st {
    struct object object;
    struct image_names names;
    bool named; /* the image says all that it defines */
    pthread_mutex_t lock;
    struct CUfunc_st *functions;
    uint64_t bytes;
    struct image_variable *variables;
    struct placed *placed;
    /* A module: its context's card. A library: all cards on which a context needed it. */
    bool on_card[FENKA_NODE_CARDS];
    struct CUmod_st *next, **place;
};

/* The memory of a variable that a program asked for. It is charged with the module. */
struct placed {
    const struct image_variable *variable;
    uintptr_t base;
    struct placed *next;
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
    image_names(image, size, &made->names);
    made->named = made->names.complete && made->names.functions;
    pthread_mutex_init(&made->lock, NULL);
    made->bytes = sim_memory_taken(image_size(image, size, &made->variables));
    CUresult result = context ? load_on(made, context->card) : load_here(made);
    if (result != CUDA_SUCCESS) {
        image_names_free(&made->names);
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

static void forget_variables(CUmodule module) {
    for (struct placed *placed = module->placed, *next; placed; placed = next) {
        next = placed->next;
        memory_drop(placed->base, 1u << MEMORY_VARIABLE);
        free(placed);
    }
    module->placed = NULL;
}

static void unload(CUmodule module) {
    forget_variables(module);
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
    image_names_free(&module->names);
    image_variables_free(module->variables);
    module->variables = NULL;
    module->functions = NULL;
    object_delete(module);
}

static CUresult function_in(CUmodule module, const char *name, struct CUfunc_st **out) {
    if (!out || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    const struct image_function *defined = module->names.functions;
    while (defined && strcmp(defined->name, name) != 0)
        defined = defined->next;
    if (module->named && !defined)
        return CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&module->lock);
    struct CUfunc_st *function = module->functions;
    while (function && strncmp(function->name, name, sizeof function->name - 1) != 0)
        function = function->sibling;
    if (!function && (function = object_new(FUNCTION, sizeof *function, module->object.context))) {
        snprintf(function->name, sizeof function->name, "%s", name);
        function->module = module;
        function->arguments = defined;
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

/* The bytes of a regular file, with a NUL behind them; 0 = it is none, or cannot be read; -1 = it cannot be opened. A pipe
 * must not be waited for. */
static ssize_t read_whole(const char *path, char **image) {
    struct stat found;
    size_t got = 0;
    ssize_t more = 1;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return -1;
    bool fits = fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size <= LARGEST_FILE;
    size_t bytes = fits ? (size_t)found.st_size : 0;
    *image = fits ? malloc(bytes + 1) : NULL;
    while (*image && got < bytes && (more = read(file, *image + got, bytes - got)) > 0)
        got += (size_t)more;
    close(file);
    if (!*image || got < bytes)
        return 0;
    (*image)[got] = '\0';
    return (ssize_t)got;
}

static CUresult load_file(CUmodule *module, const char *path, CUcontext context) {
    if (!path)
        return CUDA_ERROR_INVALID_VALUE;
    char *image = NULL;
    ssize_t got = read_whole(path, &image);
    CUresult result = got < 0   ? CUDA_ERROR_FILE_NOT_FOUND
                      : got > 4 ? load(module, image, (size_t)got, context)
                                : CUDA_ERROR_INVALID_IMAGE;
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

static const struct image_variable *variable_called(CUmodule module, const char *name) {
    const struct image_variable *lists[] = {module->variables, module->names.variables};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct image_variable *variable = lists[i]; variable; variable = variable->next)
            if (strcmp(variable->name, name) == 0)
                return variable;
    return NULL;
}

static void variable_free(const struct allocation *held) { free((void *)held->base); }

/* Kernels compute nothing, but programs copy to variables and back. */
static CUresult place(CUmodule module, const struct image_variable *variable, CUdeviceptr *pointer) {
    CUcontext context = NULL;
    struct placed *known = module->placed;
    while (known && known->variable != variable)
        known = known->next;
    if (known) {
        *pointer = known->base;
        return CUDA_SUCCESS;
    }
    struct placed *made = malloc(sizeof *made);
    void *base = NULL;
    if (!made || variable->bytes > FENKA_VARIABLE_MAX ||
        posix_memalign(&base, 256, variable->bytes ? variable->bytes : 1) != 0) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(base, 0, variable->bytes);
    bool here = context_current(&context) == CUDA_SUCCESS;
    struct allocation held = {.base = (uintptr_t)base,
                              .size = variable->bytes ? variable->bytes : 1,
                              .kind = MEMORY_VARIABLE,
                              .card = here ? context->card : 0,
                              .device = here ? context->device : 0,
                              .release = variable_free};
    CUresult result = memory_link(&held);
    if (result != CUDA_SUCCESS) {
        free(base);
        free(made);
        return result;
    }
    *made = (struct placed){variable, held.base, module->placed};
    module->placed = made;
    *pointer = held.base;
    return CUDA_SUCCESS;
}

static CUresult variable_in(CUmodule module, const char *name, CUdeviceptr *pointer, size_t *bytes) {
    TRY(driver_ready());
    if (!object_get(module, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    const struct image_variable *variable = variable_called(module, name);
    if (!variable)
        return CUDA_ERROR_NOT_FOUND;
    if (bytes)
        *bytes = variable->bytes;
    if (!pointer)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&module->lock);
    CUresult result = place(module, variable, pointer);
    pthread_mutex_unlock(&module->lock);
    return result;
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

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel) {
    return cuFuncGetModule((CUmodule *)library, (CUfunction)kernel);
}

static CUresult count_functions(CUmodule module, unsigned *count) {
    TRY(driver_ready());
    if (!object_get(module, MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = 0;
    for (const struct image_function *defined = module->names.functions; defined; defined = defined->next)
        ++*count;
    return CUDA_SUCCESS;
}

static CUresult enumerate(CUmodule module, struct CUfunc_st **out, unsigned room) {
    unsigned count;
    TRY(count_functions(module, &count));
    if (!out && room)
        return CUDA_ERROR_INVALID_VALUE;
    const struct image_function *defined = module->names.functions;
    for (unsigned i = 0; i < room && i < count; i++, defined = defined->next)
        TRY(function_in(module, defined->name, &out[i]));
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary library) {
    return count_functions((CUmodule)library, count);
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int room, CUlibrary library) {
    return enumerate((CUmodule)library, (struct CUfunc_st **)kernels, room);
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule module) { return count_functions(module, count); }

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int room, CUmodule module) {
    return enumerate(module, functions, room);
}

/* ---- functions ---- */

CUresult cuFuncGetParamCount(CUfunction handle, size_t *count) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function->arguments)
        return CUDA_ERROR_NOT_SUPPORTED; /* in a packed image */
    *count = function->arguments->count;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    size_t count;
    TRY(cuFuncGetParamCount(handle, &count));
    if (!offset || index >= count)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = handle->arguments->each[index].offset;
    if (size)
        *size = handle->arguments->each[index].size;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetParamCount(CUkernel kernel, size_t *count) {
    return cuFuncGetParamCount((CUfunction)kernel, count);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    CUcontext context;
    TRY(context_current(&context));
    return cuFuncGetParamInfo((CUfunction)kernel, index, offset, size);
}

/* All code is loaded with its module. */
CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    return function_resolve(handle, &function);
}

CUresult cuFuncGetName(const char **name, CUfunction handle) {
    struct CUfunc_st *function;
    TRY(driver_ready());
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
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

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    return cuFuncSetCacheConfig((CUfunction)kernel, config);
}
