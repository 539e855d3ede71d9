/* Virtual memory management: physical blocks, and their mappings, which keep a block alive after its handle
 * has been released. */
#include "charge.h"

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    struct place place;
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_OR_RETURN(&place, place_location(&place, properties->location), bytes);
    CUresult result = REAL(cuMemCreate)(handle, bytes, properties, flags);
    return settle(result, &place, bytes, BLOCK, result ? 0 : *handle);
}

/* Handles that came from another process are not held here: their memory is charged where it was created. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct holding holding;
    bool last = release(BLOCK, handle, &holding);
    return released(REAL(cuMemRelease)(handle), last, &holding);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        holdings_refer(BLOCK, *handle);
    return result;
}

/* One that left this process and came back under the same handle has one reference more; under another, it
 * is not charged a second time. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    CUresult result = REAL(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (result == CUDA_SUCCESS)
        holdings_refer(BLOCK, *handle);
    return result;
}

static void unrefer(CUmemGenericAllocationHandle handle) {
    struct holding block;
    bool last = release(BLOCK, handle, &block);
    released(CUDA_SUCCESS, last, &block);
}

/* Referred to before the driver is asked: another thread may release the handle as soon as it is mapped. */
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    struct holding mapping = {.key = address, .bytes = bytes, .references = 1, .kind = MAPPING, .card = NO_CARD};
    struct holding old;
    mapping.owner = holdings_refer(BLOCK, handle) ? handle : 0;
    CUresult result = REAL(cuMemMap)(address, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS)
        holdings_put(mapping, &old);
    else if (mapping.owner)
        unrefer(handle);
    return result;
}

/* One call may unmap several mappings that lie side by side, and only whole ones. */
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct holding mapping;
    CUresult result = REAL(cuMemUnmap)(address, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    for (CUdeviceptr at = address; at < address + bytes && release(MAPPING, at, &mapping); at += mapping.bytes) {
        if (mapping.owner)
            unrefer(mapping.owner);
    }
    return result;
}

/* Tiles of sparse arrays: which of them later replaces which is not followed, so a block that was once
 * mapped so stays charged. */
static void refer_all(const CUarrayMapInfo *list, unsigned int count) {
    for (unsigned int i = 0; i < count; i++)
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            holdings_refer(BLOCK, list[i].memHandle.memHandle);
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync)(list, count, stream);
    if (result == CUDA_SUCCESS)
        refer_all(list, count);
    return result;
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync_ptsz)(list, count, stream);
    if (result == CUDA_SUCCESS)
        refer_all(list, count);
    return result;
}
