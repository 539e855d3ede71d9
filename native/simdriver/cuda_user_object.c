/* User objects: references that graphs hold on what belongs to the program. The last one calls the program's destructor
 * at once, in the thread that releases it; a program may not depend on which thread that is. */
#include <stdlib.h>

#include "graph.h"

struct CUuserObject_st {
    struct object object;
    CUhostFn destroy;
    void *pointer;
    unsigned references;
};

/* What a graph holds of one object. */
struct graph_user {
    CUuserObject object;
    unsigned count;
    struct graph_user *next;
};

static CUuserObject user_object(CUuserObject handle) { return object_get(handle, USER_OBJECT); }

CUresult cuUserObjectCreate(CUuserObject *out, void *pointer, CUhostFn destroy, unsigned int count,
                            unsigned int flags) {
    TRY(driver_ready());
    if (!out || !destroy || count == 0 || count > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    CUuserObject made = object_new(USER_OBJECT, sizeof *made, NULL);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->destroy = destroy;
    made->pointer = pointer;
    made->references = count;
    *out = made;
    return CUDA_SUCCESS;
}

static bool retain(CUuserObject object, unsigned count) {
    unsigned now = __atomic_load_n(&object->references, __ATOMIC_ACQUIRE);
    do
        if (now == 0 || count > INT32_MAX - now)
            return false;
    while (!__atomic_compare_exchange_n(&object->references, &now, now + count, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE));
    return true;
}

static CUresult release(CUuserObject object, unsigned count) {
    unsigned now = __atomic_load_n(&object->references, __ATOMIC_ACQUIRE);
    do
        if (count > now)
            return CUDA_ERROR_INVALID_VALUE;
    while (!__atomic_compare_exchange_n(&object->references, &now, now - count, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE));
    if (now == count) {
        CUhostFn destroy = object->destroy;
        void *pointer = object->pointer;
        object_delete(object);
        destroy(pointer);
    }
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
    TRY(driver_ready());
    if (!user_object(object) || count == 0 || !retain(object, count))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
    TRY(driver_ready());
    return user_object(object) && count ? release(object, count) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult add(CUgraph graph, CUuserObject object, unsigned count) {
    struct graph_user *user = graph->users;
    while (user && user->object != object)
        user = user->next;
    if (!user) {
        user = calloc(1, sizeof *user);
        if (!user)
            return CUDA_ERROR_OUT_OF_MEMORY;
        user->object = object;
        user->next = graph->users;
        graph->users = user;
    }
    user->count += count;
    return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
    TRY(driver_ready());
    if (!object_get(graph, GRAPH) || !user_object(object) || count == 0 || flags & ~CU_GRAPH_USER_OBJECT_MOVE)
        return CUDA_ERROR_INVALID_VALUE;
    bool moved = flags & CU_GRAPH_USER_OBJECT_MOVE;
    if (moved ? count > object->references : !retain(object, count))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = add(graph, object, count);
    if (result != CUDA_SUCCESS && !moved)
        release(object, count);
    return result;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
    TRY(driver_ready());
    if (!object_get(graph, GRAPH) || !user_object(object) || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_user **place = &graph->users;
    while (*place && (*place)->object != object)
        place = &(*place)->next;
    struct graph_user *user = *place;
    if (!user || count > user->count)
        return CUDA_ERROR_INVALID_VALUE;
    user->count -= count;
    if (user->count == 0) {
        *place = user->next;
        free(user);
    }
    return release(object, count);
}

bool graph_users_copy(CUgraph from, CUgraph to) {
    for (struct graph_user *user = from->users; user; user = user->next) {
        if (!user_object(user->object) || !retain(user->object, 1))
            return false;
        if (add(to, user->object, 1) != CUDA_SUCCESS) {
            release(user->object, 1);
            return false;
        }
    }
    return true;
}

void graph_users_release(CUgraph graph) {
    for (struct graph_user *user = graph->users, *next; user; user = next) {
        next = user->next;
        graph->users = next;
        release(user->object, user->count);
        free(user);
    }
}
