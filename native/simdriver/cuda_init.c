/* Initialisation, versions and error texts. */
#include <stdlib.h>

#include "driver.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const struct {
    int code;
    const char *name, *sentence;
} errors[] = {
#include "cuda_errors.inc"
};

/* CUDA does not survive a fork: the child starts like a process that has not called cuInit. */
static void after_fork(void) {
    node_forget();
    driver_initialised = false;
    device_count = 0;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    objects_after_fork();
    contexts_after_fork();
    context_stack_after_fork();
    memory_after_fork();
    vmm_handles_after_fork();
    mappings_after_fork();
    addresses_after_fork();
    arena_after_fork();
    ipc_share_after_fork();
    ipc_after_fork();
    captures_after_fork();
    streams_after_fork();
    events_after_fork();
    timeline_after_fork();
    pools_after_fork();
    managed_after_fork();
    graph_memory_after_fork();
    modules_after_fork();
    host_functions_after_fork();
    coredump_after_fork();
}

static CUresult initialise(void) {
    static bool forks_watched; /* this library is never unloaded, see the Makefile */
    if (!forks_watched)
        forks_watched = pthread_atfork(NULL, NULL, after_fork) == 0;
    if (node_state)
        node_detach();
    int error = node_attach(NODE_HELLO_CUDA);
    if (error != 0)
        return CUDA_ERROR_SYSTEM_NOT_READY;
    uint32_t marks[FENKA_NODE_CARDS];
    device_count = visible_cards(getenv("CUDA_VISIBLE_DEVICES"), node_state, device_cards, marks);
    for (int device = 0; device < device_count; device++)
        node_state->processes[node_slot].instances[device_cards[device]] = marks[device];
    if (device_count == 0) {
        node_detach();
        return CUDA_ERROR_NO_DEVICE;
    }
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    if (!driver_initialised) {
        result = initialise();
        driver_initialised = result == CUDA_SUCCESS;
    } else if (!node_alive()) {
        result = CUDA_ERROR_SYSTEM_NOT_READY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int driver_version_of(int asked) {
    static uint32_t of_node; /* programs ask for hundreds of functions */
    pthread_mutex_lock(&lock);
    if (!of_node)
        of_node = node_cuda_version();
    pthread_mutex_unlock(&lock);
    return of_node && asked > (int)of_node ? (int)of_node : asked;
}

/* Also answers before cuInit, like the real driver; without a node, with the version that this was built against. */
CUresult cuDriverGetVersion(int *version) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    uint32_t of_node = node_cuda_version();
    pthread_mutex_unlock(&lock);
    *version = of_node ? (int)of_node : CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && !*text; i++)
        if (errors[i].code == (int)error)
            *text = errors[i].name;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && !*text; i++)
        if (errors[i].code == (int)error)
            *text = errors[i].sentence;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
