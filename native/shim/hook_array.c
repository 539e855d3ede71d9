/* Arrays and mipmapped arrays. The card stores them in tiles, so they take more than their elements. The driver says how
 * much of an array without memory only, so it is asked of one that is made for the question. */
#include "card_bytes.h"
#include "charge.h"

#define WITHOUT_MEMORY (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)
#define LARGEST ((uint64_t)1 << 50) /* more than any card has: refused without asking the driver */

/* Packed and compressed formats need at most 8 bytes a channel. */
static uint64_t channel_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 8;
    }
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b ? b : 1, &product) ? UINT64_MAX : product;
}

static uint64_t shrunk(uint64_t extent, unsigned int level) {
    uint64_t at_level = level < 64 ? extent >> level : 0;
    return at_level ? at_level : 1;
}

/* The smallest tile has 64 bytes of each of 8 rows. The number of layers and cube faces is the same at every level; a
 * third dimension shrinks. */
static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int level) {
    bool layered = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t row = times(shrunk(d->Width, level), channel_bytes(d->Format) * d->NumChannels);
    uint64_t rows = d->Height ? rounded_up(shrunk(d->Height, level), 8) : 1;
    uint64_t slice = times(rounded_up(row, 64), rows);
    return times(slice, layered ? d->Depth : shrunk(d->Depth, level));
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    uint64_t total = 0;
    for (unsigned int level = 0; level < levels && level < 64; level++)
        if (__builtin_add_overflow(total, level_bytes(d, level), &total))
            return UINT64_MAX;
    return card_bytes(total);
}

/* 0 where the driver does not say: before CUDA 11.7, or for a shape that it refuses. */
static uint64_t required_by_array(const CUDA_ARRAY3D_DESCRIPTOR *unbacked, CUdevice device) {
    CUDA_ARRAY_MEMORY_REQUIREMENTS required = {0};
    CUarray array;
    if (!HAS(cuArrayGetMemoryRequirements) || REAL(cuArray3DCreate_v2)(&array, unbacked) != CUDA_SUCCESS)
        return 0;
    bool said = REAL(cuArrayGetMemoryRequirements)(&required, array, device) == CUDA_SUCCESS;
    REAL(cuArrayDestroy)(array);
    return said ? required.size : 0;
}

static uint64_t required_by_mipmap(const CUDA_ARRAY3D_DESCRIPTOR *unbacked, unsigned int levels, CUdevice device) {
    CUDA_ARRAY_MEMORY_REQUIREMENTS required = {0};
    CUmipmappedArray mipmap;
    if (!HAS(cuMipmappedArrayGetMemoryRequirements) ||
        REAL(cuMipmappedArrayCreate)(&mipmap, unbacked, levels) != CUDA_SUCCESS)
        return 0;
    bool said = REAL(cuMipmappedArrayGetMemoryRequirements)(&required, mipmap, device) == CUDA_SUCCESS;
    REAL(cuMipmappedArrayDestroy)(mipmap);
    return said ? required.size : 0;
}

/* `levels`: 0 = not mipmapped. */
static uint64_t array_taken(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    CUdevice device;
    if (!d || d->Flags & WITHOUT_MEMORY)
        return 0;
    uint64_t computed = array_bytes(d, levels ? levels : 1), required = 0;
    CUDA_ARRAY3D_DESCRIPTOR unbacked = *d;
    unbacked.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    if (computed <= LARGEST && REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS)
        required = levels ? required_by_mipmap(&unbacked, levels, device) : required_by_array(&unbacked, device);
    required = card_bytes(required);
    return required > computed ? required : computed;
}

#define CREATE(kind, handle, bytes_needed, call)                                                \
    do {                                                                                        \
        struct target target_;                                                                  \
        uint64_t bytes_ = (bytes_needed);                                                       \
        CHARGE_OR_RETURN(&target_, target_current(&target_), bytes_);                           \
        CUresult result_ = (call);                                                              \
        return charge_commit(result_, &target_, bytes_, kind, result_ ? 0 : (uint64_t)*handle); \
    } while (0)

/* The four kinds of descriptors differ only in the width of their fields. */
#define IN_3D(d, depth, flags)                                                               \
    &(CUDA_ARRAY3D_DESCRIPTOR) {                                                             \
        .Width = (d)->Width, .Height = (d)->Height, .Depth = (depth), .Format = (d)->Format, \
        .NumChannels = (d)->NumChannels, .Flags = (flags)                                    \
    }

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
    CREATE(ARRAY, array, d ? array_taken(IN_3D(d, 0, 0), 0) : 0, REAL(cuArrayCreate)(array, d));
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    CREATE(ARRAY, array, d ? array_taken(IN_3D(d, 0, 0), 0) : 0, REAL(cuArrayCreate_v2)(array, d));
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
    CREATE(ARRAY, array, d ? array_taken(IN_3D(d, d->Depth, d->Flags), 0) : 0, REAL(cuArray3DCreate)(array, d));
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    CREATE(ARRAY, array, array_taken(d, 0), REAL(cuArray3DCreate_v2)(array, d));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    CREATE(MIPMAP, array, array_taken(d, levels), REAL(cuMipmappedArrayCreate)(array, d, levels));
}

CUresult cuArrayDestroy(CUarray array) {
    struct allocation allocation;
    bool ours = free_begin(ARRAY, (uint64_t)array, &allocation);
    return free_end(REAL(cuArrayDestroy)(array), ours, &allocation);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    struct allocation allocation;
    bool ours = free_begin(MIPMAP, (uint64_t)array, &allocation);
    return free_end(REAL(cuMipmappedArrayDestroy)(array), ours, &allocation);
}
