/* Green contexts: contexts that have a part of a card's multiprocessors. A kernel takes as much longer as the part is
 * smaller; kernels of different parts take turns, as all work of a card does here. */
#include <string.h>

#include "driver.h"

#define RESOURCES 3 /* one of each type */

struct CUdevResourceDesc_st {
    struct object object;
    CUdevResource resources[RESOURCES];
    unsigned count;
};

struct CUgreenCtx_st {
    struct object object;
    CUcontext context;
    struct CUdevResourceDesc_st parts;
};

static const CUdevResource *part_of(const struct CUdevResourceDesc_st *parts, CUdevResourceType type) {
    for (unsigned i = 0; i < parts->count; i++)
        if (parts->resources[i].type == type)
            return &parts->resources[i];
    return NULL;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count) {
    TRY(driver_ready());
    if (!out || !resources || count == 0 || count > RESOURCES)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUdevResourceDesc_st parts = {.count = 0};
    for (unsigned i = 0; i < count; i++) {
        bool empty = resources[i].type == CU_DEV_RESOURCE_TYPE_SM && resources[i].sm.smCount == 0;
        if (resources[i].type == CU_DEV_RESOURCE_TYPE_INVALID || empty || part_of(&parts, resources[i].type))
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        parts.resources[parts.count++] = resources[i];
    }
    if (!part_of(&parts, CU_DEV_RESOURCE_TYPE_SM))
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    struct CUdevResourceDesc_st *made = object_new(RESOURCES_OF_DEVICE, sizeof *made, NULL);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(made->resources, parts.resources, sizeof made->resources);
    made->count = parts.count;
    *out = made;
    return CUDA_SUCCESS;
}

static struct CUgreenCtx_st *get(CUgreenCtx handle) {
    struct CUgreenCtx_st *green = object_get(handle, GREEN);
    return green && context_valid(green->context) ? green : NULL;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc parts, CUdevice device, unsigned int flags) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!out || flags != CU_GREEN_CTX_DEFAULT_STREAM || !object_get(parts, RESOURCES_OF_DEVICE))
        return CUDA_ERROR_INVALID_VALUE;
    unsigned multiprocessors = part_of(parts, CU_DEV_RESOURCE_TYPE_SM)->sm.smCount;
    if (multiprocessors > device_multiprocessors(card))
        return CUDA_ERROR_INVALID_VALUE;
    struct CUgreenCtx_st *made = object_new(GREEN, sizeof *made, NULL);
    CUresult result = made ? context_of_part(&made->context, device, multiprocessors) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        if (made)
            object_delete(made);
        return result;
    }
    made->parts = *parts;
    made->context->green = made;
    *out = made;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
    TRY(driver_ready());
    struct CUgreenCtx_st *green = get(handle);
    if (!green)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext context = green->context;
    object_delete(green);
    return context_part_end(context);
}

CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx handle) {
    TRY(driver_ready());
    if (!context || !get(handle))
        return CUDA_ERROR_INVALID_VALUE;
    *context = get(handle)->context;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetId(CUgreenCtx handle, unsigned long long *id) {
    TRY(driver_ready());
    if (!id || !get(handle))
        return CUDA_ERROR_INVALID_VALUE;
    *id = get(handle)->context->id;
    return CUDA_SUCCESS;
}

/* ---- its resources ---- */

CUresult green_resource(CUcontext context, CUdevResource *resource, CUdevResourceType type) {
    const CUdevResource *part = context->green ? part_of(&context->green->parts, type) : NULL;
    if (!part)
        return cuDeviceGetDevResource(context->device, resource, type);
    if (!resource)
        return CUDA_ERROR_INVALID_VALUE;
    *resource = *part;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource *resource, CUdevResourceType type) {
    TRY(driver_ready());
    return get(handle) ? green_resource(get(handle)->context, resource, type) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *resource, CUdevResourceType type) {
    TRY(driver_ready());
    return context_valid(context) ? green_resource(context, resource, type) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamGetDevResource(CUstream stream, CUdevResource *resource, CUdevResourceType type) {
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    return green_resource(context, resource, type);
}

/* ---- its work ---- */

CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx handle, unsigned int flags, int priority) {
    TRY(driver_ready());
    if (!get(handle) || flags != CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_make(out, get(handle)->context, flags, priority);
}

CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *out) {
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context->green;
    return CUDA_SUCCESS;
}

/* The end of all work that the context has now. */
CUresult cuGreenCtxRecordEvent(CUgreenCtx handle, CUevent event) {
    TRY(driver_ready());
    struct CUgreenCtx_st *green = get(handle);
    if (!green || !object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(capture_all_refuse(green->context));
    event_mark(event, green->context->card, stream_end(green->context, NULL));
    return CUDA_SUCCESS;
}

/* The calling thread waits, so all later work of the context does. */
CUresult cuGreenCtxWaitEvent(CUgreenCtx handle, CUevent event) {
    TRY(driver_ready());
    return get(handle) ? cuEventSynchronize(event) : CUDA_ERROR_INVALID_HANDLE;
}
