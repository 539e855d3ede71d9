/* Virtual memory management: physical blocks, and their mappings, which keep a block alive after its handle
 * has been released. */
#include "account.h"
#include "charge.h"
#include "late.h"
#include "marks.h"

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    struct place place;
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_OR_RETURN(&place, place_location(&place, properties->location), bytes);
    CUresult result = REAL(cuMemCreate)(handle, bytes, properties, flags);
    return settle(result, &place, bytes, BLOCK, result ? 0 : *handle);
}

/* What came from another process is charged there; what went to others may be in a descriptor still. */
static CUresult given_up(CUresult result, bool last, const struct holding *block) {
    if (!last || result != CUDA_SUCCESS || block->card == NO_CARD || block->shared == OWN)
        return released(result, last, block);
    if (block->shared == IMPORTED)
        account_unimport(block->card, block->bytes);
    else
        late_give_up(block);
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct holding holding;
    bool last = release(BLOCK, handle, &holding);
    return given_up(REAL(cuMemRelease)(handle), last, &holding);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        holdings_refer(BLOCK, *handle);
    return result;
}

/* Fabric handles are no descriptors: who has one, nobody can tell. */
static CUresult exported(CUresult result, CUmemGenericAllocationHandle handle, const int *descriptor) {
    struct holding block;
    if (result == CUDA_SUCCESS && holdings_export(BLOCK, handle, &block) && block.card != NO_CARD)
        account_export(block.card, block.bytes);
    if (result != CUDA_SUCCESS || !holdings_find(BLOCK, handle, &block) || block.shared != EXPORTED)
        return result;
    uint64_t mark = holdings_mark(handle, descriptor ? account_mark(block.card) : UNMARKED);
    if (mark > UNMARKED && !marks_put(*descriptor, mark, block.bytes))
        holdings_mark(handle, UNMARKED);
    return result;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    return exported(REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags), handle,
                    type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? shareable : NULL);
}

/* How large an imported block is, its mark tells, or at least its first mapping, for mappings begin where it
 * begins. */
static CUresult import_sized(CUmemGenericAllocationHandle handle, uint64_t bytes) {
    struct holding block;
    struct place place;
    CUmemAllocationProp properties;
    if (!holdings_find(BLOCK, handle, &block) || block.shared != IMPORTED || block.bytes >= bytes)
        return CUDA_SUCCESS;
    if (REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) != CUDA_SUCCESS ||
        place_location(&place, properties.location) != CUDA_SUCCESS || place.card == NO_CARD)
        return CUDA_SUCCESS;
    uint64_t wanted = bytes - block.bytes;
    if (!account_import(place.card, wanted))
        return CUDA_ERROR_OUT_OF_MEMORY;
    account_unimport(place.card, wanted - holdings_grow(handle, place.card, bytes));
    return CUDA_SUCCESS;
}

/* One that left this process and came back under the same handle has one reference more. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    struct holding old, imported = {.references = 1, .kind = BLOCK, .card = NO_CARD, .shared = IMPORTED};
    struct mark mark;
    CUresult result = lease_ready() ? REAL(cuMemImportFromShareableHandle)(handle, shareable, type) : LEASE_BROKEN;
    if (result != CUDA_SUCCESS || holdings_refer(BLOCK, *handle))
        return result;
    imported.key = *handle;
    holdings_put(imported, &old);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && marks_read((int)(intptr_t)shareable, &mark))
        result = import_sized(*handle, mark.bytes);
    if (result != CUDA_SUCCESS)
        cuMemRelease(*handle);
    return result;
}

static void unrefer(CUmemGenericAllocationHandle handle) {
    struct holding block;
    bool last = release(BLOCK, handle, &block);
    given_up(CUDA_SUCCESS, last, &block);
}

/* Referred to before the driver is asked: another thread may release the handle as soon as it is mapped. */
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    struct holding mapping = {.key = address, .bytes = bytes, .references = 1, .kind = MAPPING, .card = NO_CARD};
    struct holding old;
    mapping.owner = holdings_refer(BLOCK, handle) ? handle : 0;
    CUresult result = mapping.owner ? import_sized(handle, bytes) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = REAL(cuMemMap)(address, bytes, offset, handle, flags);
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
