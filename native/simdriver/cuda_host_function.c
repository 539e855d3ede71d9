/* Functions of the program that a stream calls. One thread of the driver runs them, each when the work
 * before it is done; who synchronises waits for them, too. */
#include <stdlib.h>

#include "graph.h"
#include "timeline.h"

struct call {
    struct timeline_place at;
    CUcontext context;
    CUstream stream;
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
    struct call *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct call *queue; /* by position; what is equal in the order of asking */
static bool running;

static void *serve(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!queue)
            pthread_cond_wait(&changed, &lock);
        struct call *call = queue;
        queue = call->next;
        pthread_mutex_unlock(&lock);
        timeline_wait(call->at);
        if (call->callback)
            call->callback(call->stream, CUDA_SUCCESS, call->data);
        else
            call->function(call->data);
        pthread_mutex_lock(&lock);
        call->context->host_functions--;
        pthread_cond_broadcast(&changed);
        free(call);
    }
    return unused;
}

static CUresult enqueue(CUstream handle, CUhostFn function, CUstreamCallback callback, void *data)
{
    CUcontext context;
    CUstream stream;
    TRY(stream_resolve(handle, &context, &stream));
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {function, data}};
    if (callback) /* what a graph calls has another signature */
        TRY(capture_refuse(context, stream));
    TRY(capture_work(context, stream, &work, &taken));
    if (taken)
        return CUDA_SUCCESS;
    struct call *call = malloc(sizeof *call);
    if (!call)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *call = (struct call){timeline_own(context->card, stream_end(context, stream)), context, handle, function, callback, data,
                          NULL};
    pthread_mutex_lock(&lock);
    pthread_t thread;
    if (!running && pthread_create(&thread, NULL, serve, NULL) == 0) {
        pthread_detach(thread);
        running = true;
    }
    if (running) {
        struct call **place = &queue;
        while (*place && ((*place)->at.card != call->at.card ||
                          (*place)->at.position <= call->at.position))
            place = &(*place)->next;
        call->next = *place;
        *place = call;
        context->host_functions++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    if (running)
        return CUDA_SUCCESS;
    free(call);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void host_functions_wait(CUcontext context)
{
    if (__atomic_load_n(&context->host_functions, __ATOMIC_ACQUIRE) == 0)
        return;
    pthread_mutex_lock(&lock);
    while (context->host_functions > 0)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void host_functions_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    queue = NULL;
    running = false;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
    return function ? enqueue(stream, function, NULL, data) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data,
                             unsigned int flags)
{
    return callback && flags == 0 ? enqueue(stream, NULL, callback, data)
                                  : CUDA_ERROR_INVALID_VALUE;
}
