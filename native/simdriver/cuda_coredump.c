/* Settings of core dumps, of the process and of its contexts. They are kept; no simulated kernel ever fails. */
#include <string.h>

#include "driver.h"

#define NAME 1024
#define CONTEXTS 64 /* with settings of their own */

struct settings {
    uint64_t context; /* its id; 0 = of the process */
    bool trigger_host, exception, user_trigger, lightweight;
    int flags;
    char file[NAME], pipe[NAME];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct settings process = {.trigger_host = true};
static struct settings own[CONTEXTS];
static unsigned count;

void coredump_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    count = 0;
}

static bool *flag_of(struct settings *settings, CUcoredumpSettings which) {
    switch ((int)which) {
    case CU_COREDUMP_TRIGGER_HOST:
        return &settings->trigger_host;
    case CU_COREDUMP_ENABLE_ON_EXCEPTION:
        return &settings->exception;
    case CU_COREDUMP_ENABLE_USER_TRIGGER:
        return &settings->user_trigger;
    case CU_COREDUMP_LIGHTWEIGHT:
        return &settings->lightweight;
    default:
        return NULL;
    }
}

static char *name_of(struct settings *settings, CUcoredumpSettings which) {
    return which == CU_COREDUMP_FILE ? settings->file : which == CU_COREDUMP_PIPE ? settings->pipe : NULL;
}

static CUresult get(struct settings *settings, CUcoredumpSettings which, void *value, size_t *size) {
    bool *flag = flag_of(settings, which);
    char *name = name_of(settings, which);
    const void *from = flag ? (void *)flag : name ? (void *)name : (void *)&settings->flags;
    size_t bytes = flag ? sizeof *flag : name ? strlen(name) + 1 : sizeof settings->flags;
    if (!flag && !name && which != CU_COREDUMP_GENERATION_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    if (value && *size < bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (value)
        memcpy(value, from, bytes);
    *size = bytes;
    return CUDA_SUCCESS;
}

static CUresult set(struct settings *settings, CUcoredumpSettings which, const void *value, size_t size) {
    bool *flag = flag_of(settings, which);
    char *name = name_of(settings, which);
    if (name) {
        size_t length = strnlen(value, size);
        if (length >= NAME)
            return CUDA_ERROR_INVALID_VALUE;
        memcpy(name, value, length);
        name[length] = '\0';
        return CUDA_SUCCESS;
    }
    if (flag && size >= sizeof *flag)
        *flag = *(const unsigned char *)value != 0;
    else if (which == CU_COREDUMP_GENERATION_FLAGS && size >= sizeof settings->flags)
        memcpy(&settings->flags, value, sizeof settings->flags);
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* Under the lock. A context without settings of its own has the process's; NULL if there are too many. */
static struct settings *of_context(uint64_t context, bool add) {
    for (unsigned i = 0; i < count; i++)
        if (own[i].context == context)
            return &own[i];
    if (!add)
        return &process;
    if (count == CONTEXTS)
        return NULL;
    own[count] = process;
    own[count].context = context;
    return &own[count++];
}

static CUresult reach(CUcontext context, CUcoredumpSettings which, const void *value, void *out, size_t *size) {
    if (!size)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct settings *settings = context ? of_context(context->id, value) : &process;
    CUresult result = !settings ? CUDA_ERROR_OUT_OF_MEMORY
                      : value   ? set(settings, which, value, *size)
                                : get(settings, which, out, size);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCoredumpGetAttributeGlobal(CUcoredumpSettings which, void *value, size_t *size) {
    TRY(driver_ready());
    return reach(NULL, which, NULL, value, size);
}

CUresult cuCoredumpSetAttributeGlobal(CUcoredumpSettings which, void *value, size_t *size) {
    TRY(driver_ready());
    return value ? reach(NULL, which, value, NULL, size) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCoredumpGetAttribute(CUcoredumpSettings which, void *value, size_t *size) {
    CUcontext context;
    TRY(context_current(&context));
    return reach(context, which, NULL, value, size);
}

CUresult cuCoredumpSetAttribute(CUcoredumpSettings which, void *value, size_t *size) {
    CUcontext context;
    TRY(context_current(&context));
    return value ? reach(context, which, value, NULL, size) : CUDA_ERROR_INVALID_VALUE;
}
