/* Captures of streams: the work of a captured stream is added to a graph. A stream joins a capture by waiting for an
 * event that was recorded in it. A call that is forbidden during a capture invalidates it. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

struct capture {
    CUgraph graph;
    CUstreamCaptureMode mode;
    CUstream origin;
    pthread_t thread;
    uint64_t id;
    bool invalid;
    bool borrowed; /* the graph is the program's, and may have had nodes before */
    CUstream members;
    struct capture *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static uint64_t last_id;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void captures_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    captures = NULL;
}

bool stream_capturing(CUstream stream) { return stream && __atomic_load_n(&stream->capture, __ATOMIC_ACQUIRE); }

/* The nodes on which the stream's next node depends, or that an event stands for. */
static bool set_tips(struct tips *tips, const CUgraphNode *nodes, size_t count) {
    CUgraphNode *copy = calloc(count + 1, sizeof *copy);
    if (!copy)
        return false;
    if (count)
        memcpy(copy, nodes, count * sizeof *copy);
    free(tips->nodes);
    *tips = (struct tips){copy, count};
    return true;
}

static bool add_tips(struct tips *tips, const struct tips *more) {
    CUgraphNode *all = calloc(tips->count + more->count + 1, sizeof *all);
    if (!all)
        return false;
    if (tips->count)
        memcpy(all, tips->nodes, tips->count * sizeof *all);
    size_t count = tips->count;
    for (size_t i = 0; i < more->count; i++) {
        size_t seen = 0;
        while (seen < count && all[seen] != more->nodes[i])
            seen++;
        if (seen == count)
            all[count++] = more->nodes[i];
    }
    free(tips->nodes);
    *tips = (struct tips){all, count};
    return true;
}

static void leave(CUstream stream) {
    free(stream->tips.nodes);
    stream->tips = (struct tips){NULL, 0};
    __atomic_store_n(&stream->capture, NULL, __ATOMIC_RELEASE);
}

/* Work on the legacy stream would have to wait for captured streams, which wait for it. */
static CUresult legacy_use(CUcontext context) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (capture->origin->object.context == context && !(capture->origin->flags & CU_STREAM_NON_BLOCKING)) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult capture_work(CUcontext context, CUstream stream, const struct graph_work *work, bool *taken) {
    *taken = false;
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE))
        return CUDA_SUCCESS;
    if (!stream)
        return legacy_use(context);
    CUresult result = CUDA_SUCCESS;
    CUgraphNode node;
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    if (capture) {
        *taken = true;
        result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                  : graph_add(capture->graph, stream->tips.nodes, stream->tips.count, work, &node);
        if (result == CUDA_SUCCESS)
            node->capture = capture->id;
        if (result == CUDA_SUCCESS && !set_tips(&stream->tips, &node, 1))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* A call that may wait for the device is forbidden to threads that capture. During a capture in global mode it is also
 * forbidden to all threads that have not relaxed their mode. */
CUresult capture_unsafe(void) {
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE) || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture; capture = capture->next) {
        bool ours = pthread_equal(capture->thread, pthread_self());
        bool forbids = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL
                           ? ours || thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL
                           : capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && ours;
        if (forbids) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult capture_refuse(CUcontext context, CUstream stream) {
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE))
        return CUDA_SUCCESS;
    if (!stream)
        return legacy_use(context);
    pthread_mutex_lock(&lock);
    bool captured = stream->capture;
    if (captured)
        stream->capture->invalid = true;
    pthread_mutex_unlock(&lock);
    return captured ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_all_refuse(CUcontext context) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (capture->origin->object.context == context) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

bool capture_record(CUevent event, CUstream stream) {
    pthread_mutex_lock(&lock);
    struct capture *capture = stream ? stream->capture : NULL;
    event->capture_id = capture ? capture->id : 0;
    if (capture)
        set_tips(&event->tips, stream->tips.nodes, stream->tips.count);
    pthread_mutex_unlock(&lock);
    return capture;
}

static struct capture *by_id(uint64_t id) {
    struct capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

CUresult capture_wait(CUevent event, CUstream stream, bool *taken) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    struct capture *theirs = event->capture_id ? by_id(event->capture_id) : NULL;
    struct capture *ours = stream ? stream->capture : NULL;
    *taken = theirs || ours;
    if (event->capture_id && !theirs) {
        result = CUDA_ERROR_CAPTURED_EVENT; /* of a capture that has ended */
    } else if (theirs && !stream) {
        theirs->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    } else if (ours && !theirs) {
        ours->invalid = true; /* waits for work outside the graph */
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (ours && ours != theirs) {
        ours->invalid = theirs->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    } else if (theirs) {
        if (!ours) {
            stream->member = theirs->members;
            theirs->members = stream;
            __atomic_store_n(&stream->capture, theirs, __ATOMIC_RELEASE);
        }
        if (!add_tips(&stream->tips, &event->tips))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool capture_knows(CUevent event) { return __atomic_load_n(&event->capture_id, __ATOMIC_ACQUIRE) != 0; }

/* Whether the last nodes of the streams that were forked come before the origin's last ones. Nodes that the program
 * added by hand, or that were there before the capture, need not. */
static bool joined(struct capture *capture) {
    const struct tips *ends = &capture->origin->tips;
    bool all = true, grew = true;
    for (CUgraphNode node = capture->graph->first; node; node = node->next)
        node->placed = false;
    for (size_t end = 0; end < ends->count; end++)
        if (graph_node(ends->nodes[end]))
            ends->nodes[end]->placed = true;
    while (grew) {
        grew = false;
        for (CUgraphNode node = capture->graph->first; node; node = node->next)
            for (size_t need = 0; node->placed && need < node->needs_count; need++)
                if (!node->needs[need]->placed)
                    grew = node->needs[need]->placed = true;
    }
    for (CUgraphNode node = capture->graph->first; node; node = node->next)
        all = all && (node->placed || node->capture != capture->id);
    return all;
}

/* Under the lock. */
static CUresult finish(struct capture *capture, CUgraph *graph) {
    bool lost = capture->invalid || !object_get(capture->graph, GRAPH);
    CUresult result = lost              ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : joined(capture) ? CUDA_SUCCESS
                                        : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    for (CUstream stream = capture->members; stream; stream = stream->member)
        leave(stream);
    struct capture **place = &captures;
    while (*place != capture)
        place = &(*place)->next;
    __atomic_store_n(place, capture->next, __ATOMIC_RELEASE);
    *graph = result == CUDA_SUCCESS ? capture->graph : NULL;
    if (result != CUDA_SUCCESS && !capture->borrowed && object_get(capture->graph, GRAPH))
        graph_delete(capture->graph);
    free(capture);
    return result;
}

/* The stream is destroyed. If it is the capture's origin, the capture ends. Otherwise its work stays in the graph, and
 * the capture's end checks whether it was joined. */
void capture_lose(CUstream stream) {
    CUgraph none;
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture;
    if (capture) {
        if (capture->origin == stream) {
            capture->invalid = true;
            finish(capture, &none);
        } else {
            CUstream *place = &capture->members;
            while (*place && *place != stream)
                place = &(*place)->member;
            if (*place)
                *place = stream->member;
            leave(stream);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* The context ends, and its streams with it. */
void captures_drop(CUcontext context) {
    CUgraph none;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures, *next; capture; capture = next) {
        next = capture->next;
        if (capture->origin->object.context != context)
            continue;
        capture->invalid = true;
        finish(capture, &none);
    }
    pthread_mutex_unlock(&lock);
}

CUresult capture_begin(CUstream stream, CUstreamCaptureMode mode, CUgraph into, const struct tips *tips) {
    struct capture *made = calloc(1, sizeof *made);
    CUgraph graph = !made ? NULL : into ? into : graph_new();
    if (!graph) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    bool free_stream = !stream->capture;
    if (free_stream) {
        *made = (struct capture){.graph = graph,
                                 .mode = mode,
                                 .origin = stream,
                                 .members = stream,
                                 .thread = pthread_self(),
                                 .id = ++last_id,
                                 .borrowed = into,
                                 .next = captures};
        stream->member = NULL;
        if (tips && tips->count)
            set_tips(&stream->tips, tips->nodes, tips->count);
        __atomic_store_n(&stream->capture, made, __ATOMIC_RELEASE);
        __atomic_store_n(&captures, made, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    if (free_stream)
        return CUDA_SUCCESS;
    if (!into)
        graph_delete(graph);
    free(made);
    return CUDA_ERROR_ILLEGAL_STATE;
}

CUresult capture_end(CUstream stream, CUgraph *graph) {
    pthread_mutex_lock(&lock);
    struct capture *capture = stream ? stream->capture : NULL;
    CUresult result = CUDA_ERROR_ILLEGAL_STATE;
    if (capture && capture->origin != stream)
        result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    else if (capture && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
             !pthread_equal(capture->thread, pthread_self()))
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    else if (capture)
        result = finish(capture, graph);
    pthread_mutex_unlock(&lock);
    return result;
}

/* What the stream's next node depends on: these nodes, or these as well. */
CUresult capture_depend(CUstream stream, const struct tips *tips, bool instead) {
    CUresult result = CUDA_ERROR_ILLEGAL_STATE;
    pthread_mutex_lock(&lock);
    struct capture *capture = stream ? stream->capture : NULL;
    if (capture && !graph_needs_fit(capture->graph, tips->nodes, tips->count))
        result = CUDA_ERROR_INVALID_VALUE;
    else if (capture)
        result = (instead ? set_tips(&stream->tips, tips->nodes, tips->count) : add_tips(&stream->tips, tips))
                     ? CUDA_SUCCESS
                     : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&lock);
    return result;
}

static CUstreamCaptureStatus status_of(CUstream stream) {
    if (!stream || !stream->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult capture_info(CUcontext context, CUstream stream, struct capture_info *info) {
    *info = (struct capture_info){.status = CU_STREAM_CAPTURE_STATUS_NONE};
    if (!stream)
        return legacy_use(context);
    pthread_mutex_lock(&lock);
    info->status = status_of(stream);
    if (info->status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        info->id = stream->capture->id;
        info->graph = stream->capture->graph;
        info->tips = stream->tips;
    }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUstreamCaptureMode capture_exchange_mode(CUstreamCaptureMode mode) {
    CUstreamCaptureMode before = thread_mode;
    thread_mode = mode;
    return before;
}
