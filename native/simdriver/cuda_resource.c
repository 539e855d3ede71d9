/* What a device can be divided into: multiprocessors, of which green contexts have parts, and queues. */
#include "driver.h"

static unsigned granule(uint32_t card) { return node_state->cards[card].compute_major >= 9 ? 8 : 2; }

static CUresult resource_of(CUdevice device, uint32_t card, CUdevResource *resource, CUdevResourceType type) {
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
        resource->wqConfig.device = device;
        resource->wqConfig.wqConcurrencyLimit = 8;
        resource->wqConfig.sharingScope = CU_WORKQUEUE_SCOPE_DEVICE_CTX;
        return CUDA_SUCCESS;
    case CU_DEV_RESOURCE_TYPE_WORKQUEUE:
        return CUDA_SUCCESS; /* it has no fields of its own */
    default:
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    }
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    uint32_t card;
    TRY(device_card(device, &card));
    return resource_of(device, card, resource, type);
}

/* ---- division ---- */

static CUdevResource part(const CUdevResource *whole, unsigned count) {
    CUdevResource made = *whole;
    made.sm.smCount = count;
    if (count == 0)
        made.type = CU_DEV_RESOURCE_TYPE_INVALID;
    return made;
}

/* Equal groups of at least so many. Without `result` only the number of groups is returned. */
CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                     CUdevResource *remainder, unsigned int flags, unsigned int least) {
    TRY(driver_ready());
    if (!groups || !input || input->type != CU_DEV_RESOURCE_TYPE_SM || input->sm.smCoscheduledAlignment == 0)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned whole = input->sm.smCount;
    unsigned align = flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING ? 2 : input->sm.smCoscheduledAlignment;
    least = least < input->sm.minSmPartitionSize ? input->sm.minSmPartitionSize : least;
    if (least > whole)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    unsigned each = (least + align - 1) / align * align, most = each > whole ? 1 : whole / each;
    each = each > whole ? whole : each;
    unsigned made = result && *groups < most ? *groups : most;
    for (unsigned i = 0; result && i < made; i++)
        result[i] = part(input, each);
    if (remainder)
        *remainder = part(input, whole - made * each);
    *groups = made;
    return CUDA_SUCCESS;
}

/* Groups as the program describes them; 0 = as many as are left and start together. */
CUresult cuDevSmResourceSplit(CUdevResource *result, unsigned int groups, const CUdevResource *input,
                              CUdevResource *remainder, unsigned int flags, CU_DEV_SM_RESOURCE_GROUP_PARAMS *wanted) {
    (void)flags;
    TRY(driver_ready());
    if (!input || input->type != CU_DEV_RESOURCE_TYPE_SM || groups == 0 || !wanted)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned left = input->sm.smCount, align = input->sm.smCoscheduledAlignment ? input->sm.smCoscheduledAlignment : 2;
    for (unsigned i = 0; i < groups; i++) {
        unsigned count = wanted[i].smCount ? wanted[i].smCount : left / align * align;
        if (count == 0 || count % 2 != 0 || count > left)
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        wanted[i].smCount = count;
        left -= count;
        if (result)
            result[i] = part(input, count);
    }
    if (remainder)
        *remainder = part(input, left);
    return CUDA_SUCCESS;
}
