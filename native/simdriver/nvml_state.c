/* Whether the process has NVML open. */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "nvml_device.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
unsigned nvml_users;

/* A child continues to use NVML if the parent had it open. It is recognised by its PID and not by a fork
 * handler: NVML may be unloaded, and its handler would still be called in every child. */
void nvml_enter(void) {
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

void nvml_leave(void) { pthread_mutex_unlock(&lock); }

nvmlReturn_t nvml_attach(void) {
    if (node_state)
        return NVML_SUCCESS;
    return node_attach(NODE_HELLO_NVML) == 0 ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t nvml_ready(void) {
    nvml_enter();
    nvmlReturn_t result = nvml_users == 0 ? NVML_ERROR_UNINITIALIZED : nvml_attach();
    if (result == NVML_SUCCESS && !node_alive())
        result = NVML_ERROR_GPU_IS_LOST;
    nvml_leave();
    return result;
}

nvmlReturn_t nvml_text(char *to, unsigned length, const char *text) {
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}
