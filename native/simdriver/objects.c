#include "driver.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *spare[OBJECT_KINDS];

void *object_new(enum object_kind kind, size_t bytes, CUcontext context) {
    pthread_mutex_lock(&lock);
    struct object *object = spare[kind];
    if (object)
        spare[kind] = object->next;
    pthread_mutex_unlock(&lock);
    if (!object && !(object = malloc(bytes)))
        return NULL;
    memset(object, 0, bytes);
    object->context = context;
    object->life = context ? context->life : 0;
    object->kind = kind;
    return object;
}

void object_delete(void *deleted) {
    struct object *object = deleted;
    pthread_mutex_lock(&lock);
    enum object_kind kind = object->kind;
    if (kind != 0) {
        object->kind = 0;
        object->next = spare[kind];
        spare[kind] = object;
    }
    pthread_mutex_unlock(&lock);
}

void *object_get(const void *handle, enum object_kind kind) {
    const struct object *object = handle;
    if (!object || (uintptr_t)object % _Alignof(struct object) != 0 || (uintptr_t)object < 4096)
        return NULL;
    if (object->kind != kind)
        return NULL;
    CUcontext context = object->context;
    if (context && (!context->alive || context->life != object->life))
        return NULL;
    return (void *)(uintptr_t)object;
}

void objects_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(spare, 0, sizeof spare);
}
