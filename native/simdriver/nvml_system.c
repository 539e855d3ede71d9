/* NVML's beginning and end, its versions, its errors. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nvml_device.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned users; /* nvmlInit and nvmlShutdown are counted */

/* A child goes on using NVML where the parent had it open. It is recognised by its number and not by a
 * handler: NVML may be unloaded, and a handler that is left behind would be called in every child. */
static void enter(void)
{
    static pid_t owner;
    pid_t self = getpid();
    if (owner != self) {
        if (owner != 0) {
            lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
            node_forget();
        }
        owner = self;
    }
    pthread_mutex_lock(&lock);
}

static nvmlReturn_t attach(void)
{
    if (node_state)
        return NVML_SUCCESS;
    return node_attach(NODE_HELLO_NVML) == 0 ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    enter();
    if (users == 0 && node_state)
        node_detach();
    nvmlReturn_t result = attach();
    if (result == NVML_SUCCESS)
        users++;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void)
{
    enter();
    bool open = users > 0;
    if (open && --users == 0) {
        nvml_events_end();
        node_detach();
    }
    pthread_mutex_unlock(&lock);
    return open ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nvml_ready(void)
{
    enter();
    nvmlReturn_t result = users == 0 ? NVML_ERROR_UNINITIALIZED : attach();
    if (result == NVML_SUCCESS && !node_alive())
        result = NVML_ERROR_GPU_IS_LOST;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvml_text(char *to, unsigned length, const char *text)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    TRY(nvml_ready());
    return nvml_text(version, length, node_state->driver_version);
}

/* NVML's own version is the driver's behind the major number of CUDA. */
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[96];
    TRY(nvml_ready());
    snprintf(text, sizeof text, "%u.%s", node_state->cuda_version / 1000,
             node_state->driver_version);
    return nvml_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    TRY(nvml_ready());
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)node_state->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    TRY(nvml_ready());
    if (!name || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    size_t got = fread(name, 1, length - 1, file); /* NUL after the first word, as in the file */
    fclose(file);
    name[got] = '\0';
    return NVML_SUCCESS;
}

static const char *const sentences[] = {
    [NVML_SUCCESS] = "Success",
    [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
    [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
    [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
    [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
    [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
    [NVML_ERROR_NOT_FOUND] = "Not Found",
    [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
    [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
    [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
    [NVML_ERROR_TIMEOUT] = "Timeout",
    [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
    [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
    [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
    [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
    [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
    [NVML_ERROR_RESET_REQUIRED] = "GPU requires restart",
    [NVML_ERROR_OPERATING_SYSTEM] = "Operating system blocked the request",
    [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
    [NVML_ERROR_IN_USE] = "In use by another client",
    [NVML_ERROR_MEMORY] = "Insufficient Memory",
    [NVML_ERROR_NO_DATA] = "No data",
};

const char *nvmlErrorString(nvmlReturn_t code)
{
    size_t index = (size_t)code;
    const char *text = index < sizeof sentences / sizeof *sentences ? sentences[index] : NULL;
    return text ? text : "Unknown Error";
}

/* How fenka.hardware learns that there is no GPU behind this. Nothing else may ask. */
__attribute__((visibility("default"))) int fenka_simulated(void);
int fenka_simulated(void) { return 1; }
