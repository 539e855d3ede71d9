/* Tensor maps: descriptions of arrays in memory for the copies of compute capability 9.0 and later. Kernels would read
 * them; here they are checked as cuda.h describes and packed in a form of their own. They take no memory. */
#include <string.h>

#include "driver.h"

#define FIRST_CAPABILITY 9
#define RANKS 5

struct packed {
    uint8_t form, type, rank, interleave;
    uint8_t swizzle, promotion, fill, mode;
    uint64_t address;
    uint64_t digest; /* of the dimensions, strides and boxes */
};
_Static_assert(sizeof(struct packed) <= sizeof(CUtensorMap), "the map has room for it");

enum form { TILED = 1, IM2COL, IM2COL_WIDE };

struct layout {
    enum form form;
    CUtensorMapDataType type;
    cuuint32_t rank;
    void *address;
    const cuuint64_t *sizes, *strides;
    const cuuint32_t *steps;
    CUtensorMapInterleave interleave;
    CUtensorMapSwizzle swizzle;
    CUtensorMapL2promotion promotion;
    CUtensorMapFloatOOBfill fill;
    unsigned mode;
};

/* In bits. Packed types are described by the number of their values. */
static unsigned width(CUtensorMapDataType type) {
    static const unsigned bits[] = {
        [CU_TENSOR_MAP_DATA_TYPE_UINT8] = 8,         [CU_TENSOR_MAP_DATA_TYPE_UINT16] = 16,
        [CU_TENSOR_MAP_DATA_TYPE_UINT32] = 32,       [CU_TENSOR_MAP_DATA_TYPE_INT32] = 32,
        [CU_TENSOR_MAP_DATA_TYPE_UINT64] = 64,       [CU_TENSOR_MAP_DATA_TYPE_INT64] = 64,
        [CU_TENSOR_MAP_DATA_TYPE_FLOAT16] = 16,      [CU_TENSOR_MAP_DATA_TYPE_FLOAT32] = 32,
        [CU_TENSOR_MAP_DATA_TYPE_FLOAT64] = 64,      [CU_TENSOR_MAP_DATA_TYPE_BFLOAT16] = 16,
        [CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ] = 32,  [CU_TENSOR_MAP_DATA_TYPE_TFLOAT32] = 32,
        [CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ] = 32, [CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B] = 4,
        [CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B] = 4, [CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B] = 6};
    return (unsigned)type < sizeof bits / sizeof *bits ? bits[type] : 0;
}

static bool real(CUtensorMapDataType type) {
    return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ;
}

static CUresult ready(void) {
    CUcontext context;
    TRY(context_current(&context));
    return node_state->cards[context->card].compute_major >= FIRST_CAPABILITY ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

static uint64_t mix(uint64_t digest, uint64_t value) { return (digest ^ value) * 0x100000001b3ull; }

/* What all forms have in common. */
static CUresult check(const void *map, const struct layout *of) {
    TRY(ready());
    bool wide = of->interleave == CU_TENSOR_MAP_INTERLEAVE_32B;
    if (!map || !of->sizes || !of->steps || (of->rank > 1 && !of->strides) || of->rank > RANKS || width(of->type) == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (of->rank < (of->form == TILED && of->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE ? 1u : 3u))
        return CUDA_ERROR_INVALID_VALUE;
    if (!of->address || (uintptr_t)of->address % (wide ? 32 : 16))
        return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)of->interleave > CU_TENSOR_MAP_INTERLEAVE_32B ||
        (unsigned)of->swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B ||
        (unsigned)of->promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
        (unsigned)of->fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
        return CUDA_ERROR_INVALID_VALUE;
    if ((wide && of->swizzle != CU_TENSOR_MAP_SWIZZLE_32B) || (of->fill && !real(of->type)))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < of->rank; i++) {
        bool free = i == 0 && of->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE; /* its step is not used */
        if (of->sizes[i] == 0 || of->sizes[i] > 1ull << 31 || (!free && (of->steps[i] == 0 || of->steps[i] > 8)))
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned i = 0; i + 1 < of->rank; i++)
        if (of->strides[i] % (wide ? 32 : 16) || of->strides[i] >= 1ull << 40)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* The map may lie at an address that its type would not have. */
static CUresult pack(void *map, const struct layout *of, uint64_t box) {
    struct packed packed = {.form = (uint8_t)of->form,
                            .type = (uint8_t)of->type,
                            .rank = (uint8_t)of->rank,
                            .interleave = (uint8_t)of->interleave,
                            .swizzle = (uint8_t)of->swizzle,
                            .promotion = (uint8_t)of->promotion,
                            .fill = (uint8_t)of->fill,
                            .mode = (uint8_t)of->mode,
                            .address = (uintptr_t)of->address,
                            .digest = box};
    for (unsigned i = 0; i < of->rank; i++) {
        packed.digest = mix(mix(packed.digest, of->sizes[i]), of->steps[i]);
        if (i + 1 < of->rank)
            packed.digest = mix(packed.digest, of->strides[i]);
    }
    memset(map, 0, sizeof(CUtensorMap));
    memcpy(map, &packed, sizeof packed);
    return CUDA_SUCCESS;
}

/* Bytes that a swizzled row of the box may have. */
static unsigned span(CUtensorMapSwizzle swizzle) {
    switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
        return UINT32_MAX;
    case CU_TENSOR_MAP_SWIZZLE_32B:
        return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
        return 64;
    default:
        return 128;
    }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    struct layout of = {TILED, type, rank, address, sizes, strides, steps, interleave, swizzle, promotion, fill, 0};
    TRY(check(map, &of));
    if (!box)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t digest = 0;
    for (unsigned i = 0; i < rank; i++) {
        if (box[i] == 0 || box[i] > 256)
            return CUDA_ERROR_INVALID_VALUE;
        digest = mix(digest, box[i]);
    }
    uint64_t inner = (uint64_t)box[0] * width(type) / 8;
    if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && (inner % 16 || inner > span(swizzle)))
        return CUDA_ERROR_INVALID_VALUE;
    return pack(map, &of, digest);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *sizes, const cuuint64_t *strides, const int *lower, const int *upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *steps,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    struct layout of = {IM2COL, type, rank, address, sizes, strides, steps, interleave, swizzle, promotion, fill, 0};
    TRY(check(map, &of));
    if (!lower || !upper || channels == 0 || channels > 256 || pixels == 0 || pixels > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t digest = mix(channels, pixels);
    int limit = 1 << (16 / (int)(rank - 2) - 1); /* of a corner: 16, 8 or 5 bits with a sign */
    for (unsigned i = 0; i < rank - 2; i++) {
        if (lower[i] < -limit || lower[i] >= limit || upper[i] < -limit || upper[i] >= limit)
            return CUDA_ERROR_INVALID_VALUE;
        digest = mix(mix(digest, (uint64_t)lower[i]), (uint64_t)upper[i]);
    }
    return pack(map, &of, digest);
}

CUresult cuTensorMapEncodeIm2colWide(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                     const cuuint64_t *sizes, const cuuint64_t *strides, int lower, int upper,
                                     cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *steps,
                                     CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                     CUtensorMapFloatOOBfill fill) {
    CUcontext context;
    struct layout of = {IM2COL_WIDE, type,       rank,    address,   sizes, strides,
                        steps,       interleave, swizzle, promotion, fill,  (unsigned)mode};
    TRY(check(map, &of));
    TRY(context_current(&context));
    if (node_state->cards[context->card].compute_major <= FIRST_CAPABILITY)
        return CUDA_ERROR_NOT_SUPPORTED;
    if ((unsigned)mode > CU_TENSOR_MAP_IM2COL_WIDE_MODE_W128 || channels == 0 || channels > 256 || pixels == 0 ||
        pixels > 1024 || lower < INT16_MIN || lower > INT16_MAX || upper < INT16_MIN || upper > INT16_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    return pack(map, &of, mix(mix(mix(channels, pixels), (uint64_t)lower), (uint64_t)upper));
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *target, void *address) {
    void *map = target;
    struct packed packed;
    TRY(ready());
    if (!map || !address)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&packed, map, sizeof packed);
    unsigned alignment = packed.interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16;
    if (packed.form < TILED || packed.form > IM2COL_WIDE || (uintptr_t)address % alignment)
        return CUDA_ERROR_INVALID_VALUE;
    packed.address = (uintptr_t)address;
    memcpy(map, &packed, sizeof packed);
    return CUDA_SUCCESS;
}
