/* Queries of memory report the slice as if it were the card. */
#include <limits.h>

#include "charge.h"
#include "control.h"
#include "slice_meminfo.h"

/* Programs may pass NULL for a value that they do not need. */
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    struct target target;
    uint64_t slice_free, slice_total;
    size_t real_free, real_total;
    CUresult result = REAL(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result == CUDA_SUCCESS)
        result = target_current(&target);
    if (result == CUDA_SUCCESS)
        result = charge(&target, 0); /* joins the lease in a child after fork */
    if (result != CUDA_SUCCESS)
        return result;
    slice_free = real_free;
    slice_total = real_total;
    slice_meminfo(target.card, &slice_free, &slice_total);
    if (free)
        *free = slice_free;
    if (total)
        *total = slice_total;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    size_t wide_free, wide_total;
    CUresult result = cuMemGetInfo_v2(&wide_free, &wide_total);
    if (result == CUDA_SUCCESS && free)
        *free = (unsigned int)least(wide_free, UINT_MAX);
    if (result == CUDA_SUCCESS && total)
        *total = (unsigned int)least(wide_total, UINT_MAX);
    return result;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    struct target target;
    CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, device);
    if (result == CUDA_SUCCESS)
        result = target_device(&target, device);
    if (result == CUDA_SUCCESS)
        *bytes = least(*bytes, control_cap(target.card));
    return result;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t wide;
    CUresult result = cuDeviceTotalMem_v2(&wide, device);
    if (result == CUDA_SUCCESS && bytes)
        *bytes = (unsigned int)least(wide, UINT_MAX);
    return result;
}
