/* The thread that runs the program's functions, each when the work before it is done. */
#include <stdlib.h>

#include "driver.h"
#include "timeline.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct host_call *queue;
static bool running;

static void *serve(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!queue)
            pthread_cond_wait(&changed, &lock);
        struct host_call *call = queue;
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

void host_functions_wait(CUcontext context) {
    if (__atomic_load_n(&context->host_functions, __ATOMIC_ACQUIRE) == 0)
        return;
    pthread_mutex_lock(&lock);
    while (context->host_functions > 0)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void host_functions_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    queue = NULL;
    running = false;
}

/* Under the lock. The queue is sorted by position on each card; equal positions are in the order of the calls. */
static void insert(struct host_call *call) {
    struct host_call **place = &queue;
    while (*place && ((*place)->at.card != call->at.card || (*place)->at.position <= call->at.position))
        place = &(*place)->next;
    call->next = *place;
    *place = call;
}

bool host_function_add(const struct host_call *filled) {
    struct host_call *call = malloc(sizeof *call);
    pthread_t thread;
    if (!call)
        return false;
    *call = *filled;
    pthread_mutex_lock(&lock);
    if (!running && pthread_create(&thread, NULL, serve, NULL) == 0) {
        pthread_detach(thread);
        running = true;
    }
    bool added = running;
    if (added) {
        insert(call);
        call->context->host_functions++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    if (!added)
        free(call);
    return added;
}
