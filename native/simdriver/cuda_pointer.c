/* Attributes of addresses. */
#include <string.h>

#include "driver.h"

static CUresult attribute_of(const struct allocation *held, CUdeviceptr pointer, CUpointer_attribute attribute,
                             void *value) {
    bool host = held->kind == MEMORY_HOST || held->kind == MEMORY_REGISTERED || held->device < 0;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = held->context;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (held->kind == MEMORY_DEVICE)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)value = (void *)(uintptr_t)pointer;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(int *)value = 0;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = held->id;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(int *)value = held->kind == MEMORY_MANAGED;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = held->device;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)value = held->kind == MEMORY_DEVICE && !held->pool;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = held->base;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = held->size;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)value = 1;
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(cuuint64_t *)value = 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        *(int *)value = 0;
        break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(unsigned *)value = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)value = held->pool;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct allocation held;
    TRY(driver_ready());
    if (!value || !memory_find(pointer, &held))
        return CUDA_ERROR_INVALID_VALUE;
    return attribute_of(&held, pointer, attribute, value);
}

static size_t size_of(CUpointer_attribute attribute) {
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return 8;
    default:
        return 4;
    }
}

/* Unlike cuPointerGetAttribute, this function returns zeros for memory that is not CUDA's. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values,
                                CUdeviceptr pointer) {
    struct allocation held;
    TRY(driver_ready());
    if (!attributes || !values)
        return CUDA_ERROR_INVALID_VALUE;
    bool known = memory_find(pointer, &held);
    for (unsigned i = 0; i < count; i++) {
        if (!known || attribute_of(&held, pointer, attributes[i], values[i]) != CUDA_SUCCESS)
            memset(values[i], 0, size_of(attributes[i]));
        if (!known && attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)values[i] = -2; /* as documented: no device */
    }
    return CUDA_SUCCESS;
}
