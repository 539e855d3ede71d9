/* Copies of rectangles and boxes, and of pieces of arrays. */
#include <string.h>

#include "graph.h"

struct side {
    uintptr_t base;
    size_t pitch, slice;
    bool array, device;
};

struct corner {
    size_t x, y, z, pitch, height;
};

static CUresult array_corner(CUarray array, const CUDA_MEMCPY3D *what, const struct corner *at, struct side *side) {
    struct array_view view;
    TRY(array_side(array, &view));
    if (at->x > view.row_bytes || what->WidthInBytes > view.row_bytes - at->x || at->y > view.rows ||
        what->Height > view.rows - at->y || at->z > view.slices || what->Depth > view.slices - at->z)
        return CUDA_ERROR_INVALID_VALUE;
    side->array = true;
    side->pitch = view.row_bytes;
    side->slice = view.row_bytes * view.rows;
    side->base = view.base + at->z * side->slice + at->y * side->pitch + at->x;
    return CUDA_SUCCESS;
}

static CUresult linear_corner(uintptr_t base, const CUDA_MEMCPY3D *what, const struct corner *at, struct side *side) {
    side->pitch = at->pitch ? at->pitch : what->WidthInBytes;
    size_t height = at->height ? at->height : what->Height;
    if (!base || side->pitch < at->x + what->WidthInBytes || (what->Depth > 1 && height < at->y + what->Height))
        return CUDA_ERROR_INVALID_VALUE;
    side->slice = side->pitch * height;
    side->base = base + at->z * side->slice + at->y * side->pitch + at->x;
    return CUDA_SUCCESS;
}

static CUresult resolve(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array,
                        const CUDA_MEMCPY3D *what, struct corner at, struct side *side) {
    struct allocation held;
    *side = (struct side){.array = false};
    switch (type) {
    case CU_MEMORYTYPE_ARRAY:
        return array_corner(array, what, &at, side);
    case CU_MEMORYTYPE_HOST:
        side->device = addresses_contain((uintptr_t)host);
        return linear_corner((uintptr_t)host, what, &at, side);
    case CU_MEMORYTYPE_DEVICE:
        side->device = true;
        break;
    case CU_MEMORYTYPE_UNIFIED:
        side->device = memory_find(device, &held) || addresses_contain(device);
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return linear_corner(device, what, &at, side);
}

/* If any row is out of bounds, nothing is copied. */
static CUresult move(const CUDA_MEMCPY3D *what, const struct side *to, const struct side *from, bool check) {
    for (size_t z = 0; z < what->Depth; z++)
        for (size_t y = 0; y < what->Height; y++) {
            uintptr_t into = to->base + z * to->slice + y * to->pitch;
            uintptr_t out = from->base + z * from->slice + y * from->pitch;
            if (!check)
                memmove((void *)into, (void *)out, what->WidthInBytes);
            else if ((to->device && !memory_holds(into, what->WidthInBytes, true)) ||
                     (from->device && !memory_holds(out, what->WidthInBytes, false)))
                return CUDA_ERROR_INVALID_VALUE;
        }
    return CUDA_SUCCESS;
}

CUresult box_copy(const CUDA_MEMCPY3D *what) {
    struct side to, from;
    if (what->WidthInBytes == 0 || what->Height == 0 || what->Depth == 0)
        return CUDA_SUCCESS;
    if (what->srcLOD != 0 || what->dstLOD != 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(resolve(what->dstMemoryType, what->dstHost, what->dstDevice, what->dstArray, what,
                (struct corner){what->dstXInBytes, what->dstY, what->dstZ, what->dstPitch, what->dstHeight}, &to));
    TRY(resolve(what->srcMemoryType, what->srcHost, what->srcDevice, what->srcArray, what,
                (struct corner){what->srcXInBytes, what->srcY, what->srcZ, what->srcPitch, what->srcHeight}, &from));
    TRY(move(what, &to, &from, true));
    return move(what, &to, &from, false);
}

CUresult box_copy_now(const CUDA_MEMCPY3D *what) {
    CUcontext context;
    TRY(context_current(&context));
    TRY(capture_unsafe());
    stream_wait(context, NULL); /* a blocking copy follows all earlier work */
    return box_copy(what);
}

CUresult box_copy_on(const CUDA_MEMCPY3D *what, CUstream stream) {
    CUcontext context;
    bool taken;
    TRY(stream_resolve(stream, &context, &stream));
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_MEMCPY, .copy = *what};
    TRY(capture_work(context, stream, &work, &taken));
    return taken ? CUDA_SUCCESS : box_copy(what);
}

/* ---- three dimensions ---- */

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *what) { return what ? box_copy_now(what) : CUDA_ERROR_INVALID_VALUE; }

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *what, CUstream stream) {
    return what ? box_copy_on(what, stream) : CUDA_ERROR_INVALID_VALUE;
}

/* The peer variant has contexts in place of reserved fields, and is otherwise equal. */
_Static_assert(sizeof(CUDA_MEMCPY3D_PEER) == sizeof(CUDA_MEMCPY3D), "two forms of one struct");

static CUresult plain(const CUDA_MEMCPY3D_PEER *peer, CUDA_MEMCPY3D *what) {
    if (!peer)
        return CUDA_ERROR_INVALID_VALUE;
    if (!context_valid(peer->srcContext) || !context_valid(peer->dstContext))
        return CUDA_ERROR_INVALID_CONTEXT;
    memcpy(what, peer, sizeof *what);
    what->reserved0 = what->reserved1 = NULL;
    return CUDA_SUCCESS;
}

CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *peer) {
    CUDA_MEMCPY3D what;
    TRY(driver_ready());
    TRY(plain(peer, &what));
    return box_copy_now(&what);
}

CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *peer, CUstream stream) {
    CUDA_MEMCPY3D what;
    TRY(driver_ready());
    TRY(plain(peer, &what));
    return box_copy_on(&what, stream);
}

/* ---- two ---- */

static CUDA_MEMCPY3D box_of(const CUDA_MEMCPY2D *flat) {
    return (CUDA_MEMCPY3D){.srcXInBytes = flat->srcXInBytes,
                           .srcY = flat->srcY,
                           .srcMemoryType = flat->srcMemoryType,
                           .srcHost = flat->srcHost,
                           .srcDevice = flat->srcDevice,
                           .srcArray = flat->srcArray,
                           .srcPitch = flat->srcPitch,
                           .dstXInBytes = flat->dstXInBytes,
                           .dstY = flat->dstY,
                           .dstMemoryType = flat->dstMemoryType,
                           .dstHost = flat->dstHost,
                           .dstDevice = flat->dstDevice,
                           .dstArray = flat->dstArray,
                           .dstPitch = flat->dstPitch,
                           .WidthInBytes = flat->WidthInBytes,
                           .Height = flat->Height,
                           .Depth = 1};
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *flat) {
    if (!flat)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D what = box_of(flat);
    return box_copy_now(&what);
}

CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *flat) { return cuMemcpy2D_v2(flat); }

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *flat, CUstream stream) {
    if (!flat)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D what = box_of(flat);
    return box_copy_on(&what, stream);
}

/* ---- one, from and to arrays ---- */

static CUDA_MEMCPY3D row(size_t bytes) { return (CUDA_MEMCPY3D){.WidthInBytes = bytes, .Height = 1, .Depth = 1}; }

static void from_array(CUDA_MEMCPY3D *what, CUarray array, size_t offset) {
    what->srcMemoryType = CU_MEMORYTYPE_ARRAY;
    what->srcArray = array;
    what->srcXInBytes = offset;
}

static void to_array(CUDA_MEMCPY3D *what, CUarray array, size_t offset) {
    what->dstMemoryType = CU_MEMORYTYPE_ARRAY;
    what->dstArray = array;
    what->dstXInBytes = offset;
}

CUresult cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
    CUDA_MEMCPY3D what = row(bytes);
    what.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    what.srcDevice = from;
    to_array(&what, to, offset);
    return box_copy_now(&what);
}

CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
    CUDA_MEMCPY3D what = row(bytes);
    from_array(&what, from, offset);
    what.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    what.dstDevice = to;
    return box_copy_now(&what);
}

CUresult cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes) {
    CUDA_MEMCPY3D what = row(bytes);
    from_array(&what, from, from_offset);
    to_array(&what, to, to_offset);
    return box_copy_now(&what);
}

static CUDA_MEMCPY3D host_to_array(CUarray to, size_t offset, const void *from, size_t bytes) {
    CUDA_MEMCPY3D what = row(bytes);
    what.srcMemoryType = CU_MEMORYTYPE_HOST;
    what.srcHost = from;
    to_array(&what, to, offset);
    return what;
}

static CUDA_MEMCPY3D array_to_host(void *to, CUarray from, size_t offset, size_t bytes) {
    CUDA_MEMCPY3D what = row(bytes);
    from_array(&what, from, offset);
    what.dstMemoryType = CU_MEMORYTYPE_HOST;
    what.dstHost = to;
    return what;
}

CUresult cuMemcpyHtoA_v2(CUarray to, size_t offset, const void *from, size_t bytes) {
    CUDA_MEMCPY3D what = host_to_array(to, offset, from, bytes);
    return box_copy_now(&what);
}

CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream) {
    CUDA_MEMCPY3D what = host_to_array(to, offset, from, bytes);
    return box_copy_on(&what, stream);
}

CUresult cuMemcpyAtoH_v2(void *to, CUarray from, size_t offset, size_t bytes) {
    CUDA_MEMCPY3D what = array_to_host(to, from, offset, bytes);
    return box_copy_now(&what);
}

CUresult cuMemcpyAtoHAsync_v2(void *to, CUarray from, size_t offset, size_t bytes, CUstream stream) {
    CUDA_MEMCPY3D what = array_to_host(to, from, offset, bytes);
    return box_copy_on(&what, stream);
}
