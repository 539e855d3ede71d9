/* Arrays and mipmapped arrays: memory without an address. It holds the rows one behind the other, and is as large as a
 * card's, which has tiles. */
#include <string.h>

#include "driver.h"
#include "sim_memory.h"

#define MAX_LEVELS 24
#define KNOWN_FLAGS                                                                                          \
    (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_TEXTURE_GATHER | \
     CUDA_ARRAY3D_DEPTH_TEXTURE | CUDA_ARRAY3D_COLOR_ATTACHMENT | CUDA_ARRAY3D_DEFERRED_MAPPING)

struct CUmipmappedArray_st {
    struct object object;
    uintptr_t base; /* 0 = without memory */
    size_t bytes;
    unsigned count;
    CUarray levels[MAX_LEVELS];
};

static size_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    static const uint8_t formats[256] = {
        [CU_AD_FORMAT_UNSIGNED_INT8] = 1, [CU_AD_FORMAT_UNSIGNED_INT16] = 2, [CU_AD_FORMAT_UNSIGNED_INT32] = 4,
        [CU_AD_FORMAT_SIGNED_INT8] = 1,   [CU_AD_FORMAT_SIGNED_INT16] = 2,   [CU_AD_FORMAT_SIGNED_INT32] = 4,
        [CU_AD_FORMAT_HALF] = 2,          [CU_AD_FORMAT_FLOAT] = 4,
    };
    return (unsigned)shape->Format < 256 ? formats[shape->Format] * shape->NumChannels : 0;
}

static size_t at_least_1(size_t value) { return value ? value : 1; }

static size_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    size_t bytes = element_bytes(shape);
    if (__builtin_mul_overflow(bytes, shape->Width, &bytes) ||
        __builtin_mul_overflow(bytes, at_least_1(shape->Height), &bytes) ||
        __builtin_mul_overflow(bytes, at_least_1(shape->Depth), &bytes))
        return SIZE_MAX;
    return bytes;
}

/* In tiles of 64 bytes of each of 8 rows. */
static size_t tiled(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    CUDA_ARRAY3D_DESCRIPTOR padded = *shape;
    size_t element = element_bytes(shape), row;
    if (__builtin_mul_overflow(element, shape->Width, &row) || row > SIZE_MAX / 2 || shape->Height > SIZE_MAX / 2)
        return SIZE_MAX;
    padded.Format = CU_AD_FORMAT_UNSIGNED_INT8;
    padded.NumChannels = 1;
    padded.Width = rounded_up(row, 64);
    padded.Height = rounded_up(shape->Height, 8);
    return bytes_of(&padded);
}

static bool deferred(const CUDA_ARRAY3D_DESCRIPTOR *shape) { return shape->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING; }

static CUresult check(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    bool layered = shape->Flags & CUDA_ARRAY3D_LAYERED, cube = shape->Flags & CUDA_ARRAY3D_CUBEMAP;
    if (shape->Flags & ~(unsigned)KNOWN_FLAGS) /* sparse */
        return CUDA_ERROR_NOT_SUPPORTED;
    if (shape->Width == 0 || (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    if (element_bytes(shape) == 0) /* compressed and planar formats */
        return CUDA_ERROR_NOT_SUPPORTED;
    if (shape->Depth && !shape->Height && !layered)
        return CUDA_ERROR_INVALID_VALUE;
    if (layered && shape->Depth == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (cube && (shape->Width != shape->Height || shape->Depth % 6 != 0 || (!layered && shape->Depth != 6)))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUarray array_new(CUcontext context, const CUDA_ARRAY3D_DESCRIPTOR *shape, uintptr_t base) {
    CUarray array = object_new(ARRAY, sizeof *array, context);
    if (!array)
        return NULL;
    array->shape = *shape;
    array->base = base;
    array->row_bytes = element_bytes(shape) * shape->Width;
    return array;
}

CUresult array_side(CUarray handle, struct array_view *view) {
    CUarray array = object_get(handle, ARRAY);
    if (!array || !array->base)
        return CUDA_ERROR_INVALID_HANDLE;
    *view = (struct array_view){array->base, array->row_bytes, at_least_1(array->shape.Height),
                                at_least_1(array->shape.Depth)};
    return CUDA_SUCCESS;
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    CUcontext context;
    struct allocation made = {0};
    TRY(context_current(&context));
    if (!array || !shape)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(check(shape));
    if (!deferred(shape))
        TRY(memory_new(context, MEMORY_ARRAY, tiled(shape), 0, &made));
    *array = array_new(context, shape, made.base);
    if (*array)
        return CUDA_SUCCESS;
    if (made.base)
        memory_drop(made.base, 1u << MEMORY_ARRAY);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape) {
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = shape->Width, .Height = shape->Height, .Format = shape->Format, .NumChannels = shape->NumChannels};
    return cuArray3DCreate_v2(array, &full);
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray handle) {
    TRY(driver_ready());
    CUarray array = object_get(handle, ARRAY);
    if (!array)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    *shape = array->shape;
    return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *shape, CUarray handle) {
    CUDA_ARRAY3D_DESCRIPTOR full;
    TRY(cuArray3DGetDescriptor_v2(&full, handle));
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    *shape = (CUDA_ARRAY_DESCRIPTOR){
        .Width = full.Width, .Height = full.Height, .Format = full.Format, .NumChannels = full.NumChannels};
    return CUDA_SUCCESS;
}

/* Waits for the work first, as cuMemFree does. */
CUresult cuArrayDestroy(CUarray handle) {
    TRY(driver_ready());
    CUarray array = object_get(handle, ARRAY);
    if (!array)
        return CUDA_ERROR_INVALID_HANDLE;
    if (array->level) /* freed with its mipmapped array */
        return CUDA_ERROR_INVALID_VALUE;
    stream_wait(array->object.context, NULL);
    CUresult result = array->base ? memory_drop(array->base, 1u << MEMORY_ARRAY) : CUDA_SUCCESS;
    object_delete(array);
    return result;
}

/* Only of an array whose memory the program maps itself, as documented. */
static CUresult tell_required(CUDA_ARRAY_MEMORY_REQUIREMENTS *required, const CUDA_ARRAY3D_DESCRIPTOR *shape,
                              size_t bytes, CUdevice device) {
    uint32_t card;
    TRY(device_card(device, &card));
    if (!required || !deferred(shape))
        return CUDA_ERROR_INVALID_VALUE;
    *required = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = sim_memory_taken(bytes), .alignment = CARD_GRANULE};
    return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *required, CUarray handle, CUdevice device) {
    TRY(driver_ready());
    CUarray array = object_get(handle, ARRAY);
    if (!array)
        return CUDA_ERROR_INVALID_HANDLE;
    return tell_required(required, &array->shape, tiled(&array->shape), device);
}

/* ---- mipmapped ---- */

static size_t halved(size_t extent, unsigned level) { return extent == 0 ? 0 : at_least_1(extent >> level); }

static CUDA_ARRAY3D_DESCRIPTOR level_shape(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level) {
    CUDA_ARRAY3D_DESCRIPTOR smaller = *shape;
    bool layers = shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    smaller.Width = halved(shape->Width, level);
    smaller.Height = halved(shape->Height, level);
    smaller.Depth = layers ? shape->Depth : halved(shape->Depth, level);
    return smaller;
}

static unsigned deepest(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    unsigned levels = 1;
    while (levels < MAX_LEVELS &&
           ((shape->Width | shape->Height |
             (shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) ? 0 : shape->Depth)) >>
            levels) > 0)
        levels++;
    return levels;
}

static void forget_levels(CUmipmappedArray mipmap) {
    for (unsigned level = 0; level < mipmap->count; level++)
        if (mipmap->levels[level])
            object_delete(mipmap->levels[level]);
    object_delete(mipmap);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int wanted) {
    CUcontext context;
    struct allocation made = {0};
    TRY(context_current(&context));
    if (!out || !shape || wanted == 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(check(shape));
    unsigned count = wanted < deepest(shape) ? wanted : deepest(shape);
    size_t whole = 0;
    for (unsigned level = 0; level < count; level++) {
        CUDA_ARRAY3D_DESCRIPTOR smaller = level_shape(shape, level);
        if (__builtin_add_overflow(whole, tiled(&smaller), &whole))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!deferred(shape))
        TRY(memory_new(context, MEMORY_ARRAY, whole, 0, &made));
    CUmipmappedArray mipmap = object_new(MIPMAP, sizeof *mipmap, context);
    uintptr_t base = mipmap ? mipmap->base = made.base : 0;
    bool complete = mipmap;
    if (mipmap)
        mipmap->bytes = whole;
    for (unsigned level = 0; mipmap && level < count; level++) {
        CUDA_ARRAY3D_DESCRIPTOR smaller = level_shape(shape, level);
        CUarray array = mipmap->levels[mipmap->count++] = array_new(context, &smaller, base);
        complete = complete && array;
        if (array)
            array->level = true;
        base += base ? tiled(&smaller) : 0;
    }
    if (!complete) {
        if (mipmap)
            forget_levels(mipmap);
        if (made.base)
            memory_drop(made.base, 1u << MEMORY_ARRAY);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = mipmap;
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray handle, unsigned int level) {
    TRY(driver_ready());
    CUmipmappedArray mipmap = object_get(handle, MIPMAP);
    if (!mipmap)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!array || level >= mipmap->count)
        return CUDA_ERROR_INVALID_VALUE;
    *array = mipmap->levels[level];
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
    TRY(driver_ready());
    CUmipmappedArray mipmap = object_get(handle, MIPMAP);
    if (!mipmap)
        return CUDA_ERROR_INVALID_HANDLE;
    stream_wait(mipmap->object.context, NULL);
    CUresult result = mipmap->base ? memory_drop(mipmap->base, 1u << MEMORY_ARRAY) : CUDA_SUCCESS;
    forget_levels(mipmap);
    return result;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *required, CUmipmappedArray handle,
                                               CUdevice device) {
    TRY(driver_ready());
    CUmipmappedArray mipmap = object_get(handle, MIPMAP);
    if (!mipmap)
        return CUDA_ERROR_INVALID_HANDLE;
    return tell_required(required, &mipmap->levels[0]->shape, mipmap->bytes, device);
}
