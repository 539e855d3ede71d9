/* Texture and surface objects: descriptions that kernels would read through. They take no memory of their own. */
#include <string.h>

#include "driver.h"

struct texture {
    struct object object;
    bool surface;
    bool viewed;
    CUDA_RESOURCE_DESC resource;
    CUDA_TEXTURE_DESC how;
    CUDA_RESOURCE_VIEW_DESC view;
};

static bool resource_fits(const CUDA_RESOURCE_DESC *resource) {
    switch ((int)resource->resType) {
    case CU_RESOURCE_TYPE_ARRAY:
        return object_get(resource->res.array.hArray, ARRAY);
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
        return object_get(resource->res.mipmap.hMipmappedArray, MIPMAP);
    case CU_RESOURCE_TYPE_LINEAR:
        return memory_holds(resource->res.linear.devPtr, resource->res.linear.sizeInBytes, false);
    case CU_RESOURCE_TYPE_PITCH2D:
        return resource->res.pitch2D.height > 0 && resource->res.pitch2D.pitchInBytes > 0 &&
               memory_holds(resource->res.pitch2D.devPtr, 1, false);
    default:
        return false;
    }
}

static CUresult make(const CUDA_RESOURCE_DESC *resource, struct texture **out) {
    CUcontext context;
    TRY(context_current(&context));
    if (!resource || resource->flags != 0 || !resource_fits(resource))
        return CUDA_ERROR_INVALID_VALUE;
    struct texture *made = object_new(TEXTURE, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->resource = *resource;
    *out = made;
    return CUDA_SUCCESS;
}

static struct texture *get(unsigned long long handle, bool surface) {
    struct texture *held = object_get((void *)(uintptr_t)handle, TEXTURE);
    return held && held->surface == surface ? held : NULL;
}

CUresult cuTexObjectCreate(CUtexObject *out, const CUDA_RESOURCE_DESC *resource, const CUDA_TEXTURE_DESC *how,
                           const CUDA_RESOURCE_VIEW_DESC *view) {
    struct texture *made;
    if (!out || !how)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(make(resource, &made));
    made->how = *how;
    made->viewed = view;
    if (view)
        made->view = *view;
    *out = (uintptr_t)made;
    return CUDA_SUCCESS;
}

CUresult cuTexObjectDestroy(CUtexObject handle) {
    TRY(driver_ready());
    if (!get(handle, false))
        return CUDA_ERROR_INVALID_VALUE;
    object_delete((void *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUtexObject handle) {
    TRY(driver_ready());
    if (!resource || !get(handle, false))
        return CUDA_ERROR_INVALID_VALUE;
    *resource = get(handle, false)->resource;
    return CUDA_SUCCESS;
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *how, CUtexObject handle) {
    TRY(driver_ready());
    if (!how || !get(handle, false))
        return CUDA_ERROR_INVALID_VALUE;
    *how = get(handle, false)->how;
    return CUDA_SUCCESS;
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *view, CUtexObject handle) {
    TRY(driver_ready());
    if (!view || !get(handle, false) || !get(handle, false)->viewed)
        return CUDA_ERROR_INVALID_VALUE;
    *view = get(handle, false)->view;
    return CUDA_SUCCESS;
}

CUresult cuSurfObjectCreate(CUsurfObject *out, const CUDA_RESOURCE_DESC *resource) {
    struct texture *made;
    if (!out || !resource || resource->resType != CU_RESOURCE_TYPE_ARRAY)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(make(resource, &made));
    made->surface = true;
    *out = (uintptr_t)made;
    return CUDA_SUCCESS;
}

CUresult cuSurfObjectDestroy(CUsurfObject handle) {
    TRY(driver_ready());
    if (!get(handle, true))
        return CUDA_ERROR_INVALID_VALUE;
    object_delete((void *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUsurfObject handle) {
    TRY(driver_ready());
    if (!resource || !get(handle, true))
        return CUDA_ERROR_INVALID_VALUE;
    *resource = get(handle, true)->resource;
    return CUDA_SUCCESS;
}
