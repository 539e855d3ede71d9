/* What a device can be divided into: multiprocessors. Green contexts, which would use a part, are not simulated. */
#include "driver.h"

static unsigned granule(uint32_t card) { return node_state->cards[card].compute_major >= 9 ? 8 : 2; }

static CUresult resource_of(uint32_t card, CUdevResource *resource, CUdevResourceType type) {
    if (!resource)
        return CUDA_ERROR_INVALID_VALUE;
    *resource = (CUdevResource){.type = type};
    switch ((int)type) {
    case CU_DEV_RESOURCE_TYPE_SM:
        resource->sm.smCount = device_multiprocessors(card);
        resource->sm.minSmPartitionSize = granule(card);
        resource->sm.smCoscheduledAlignment = granule(card);
        return CUDA_SUCCESS;
    case CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG:
        resource->wqConfig.wqConcurrencyLimit = 8;
        resource->wqConfig.sharingScope = CU_WORKQUEUE_SCOPE_DEVICE_CTX;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    }
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    uint32_t card;
    TRY(device_card(device, &card));
    return resource_of(card, resource, type);
}

CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *resource, CUdevResourceType type) {
    TRY(driver_ready());
    return context_valid(context) ? resource_of(context->card, resource, type) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamGetDevResource(CUstream stream, CUdevResource *resource, CUdevResourceType type) {
    CUcontext context;
    TRY(stream_resolve(stream, &context, &stream));
    return resource_of(context->card, resource, type);
}
