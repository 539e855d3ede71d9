/* Virtual memory management: physical blocks (cuMemCreate) and their mappings. A mapping keeps its block after the
 * block's handle has been released. */
#include "account.h"
#include "card_bytes.h"
#include "charge.h"
#include "deferred_release.h"
#include "export_locks.h"

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    struct target target;
    uint64_t taken = card_bytes(bytes);
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    CHARGE_OR_RETURN(&target, target_location(&target, properties->location), taken);
    CUresult result = REAL(cuMemCreate)(handle, bytes, properties, flags);
    return charge_commit(result, &target, taken, BLOCK, result ? 0 : *handle);
}

/* An imported block is charged to its exporter. An exported block may still be open in a descriptor. */
static CUresult release_end(CUresult result, bool last, const struct allocation *block) {
    if (!last || result != CUDA_SUCCESS || block->card == NO_CARD || block->shared == OWN)
        return free_end(result, last, block);
    if (block->shared == IMPORTED)
        account_unimport(block->card, block->bytes);
    else
        deferred_add(block);
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct allocation allocation;
    bool last = free_begin(BLOCK, handle, &allocation);
    return release_end(REAL(cuMemRelease)(handle), last, &allocation);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        allocations_retain(BLOCK, *handle);
    return result;
}

/* Only descriptors can be locked. Nobody can tell where a fabric handle is still held. */
static CUresult export_end(CUresult result, CUmemGenericAllocationHandle handle, const int *descriptor) {
    struct allocation block;
    if (result == CUDA_SUCCESS && allocations_export(BLOCK, handle, &block) && block.card != NO_CARD)
        account_export(block.card, block.bytes);
    if (result != CUDA_SUCCESS || !allocations_find(BLOCK, handle, &block) || block.shared != EXPORTED)
        return result;
    uint64_t first_byte = descriptor ? account_export_lock(block.card) : NO_EXPORT_LOCK;
    first_byte = allocations_set_export_lock(handle, first_byte);
    if (first_byte > NO_EXPORT_LOCK && !export_lock_set(*descriptor, first_byte, block.bytes))
        allocations_set_export_lock(handle, NO_EXPORT_LOCK);
    return result;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    return export_end(REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags), handle,
                      type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? shareable : NULL);
}

/* The size of an imported block is known from its export lock, or at least from its first mapping, which starts at
 * the start of the block. */
static CUresult charge_import(CUmemGenericAllocationHandle handle, uint64_t bytes) {
    struct allocation block;
    struct target target;
    CUmemAllocationProp properties;
    if (!allocations_find(BLOCK, handle, &block) || block.shared != IMPORTED || block.bytes >= bytes)
        return CUDA_SUCCESS;
    if (REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) != CUDA_SUCCESS ||
        target_location(&target, properties.location) != CUDA_SUCCESS || target.card == NO_CARD)
        return CUDA_SUCCESS;
    uint64_t missing = bytes - block.bytes;
    if (!account_import(target.card, missing))
        return CUDA_ERROR_OUT_OF_MEMORY;
    account_unimport(target.card, missing - allocations_grow(handle, target.card, bytes));
    return CUDA_SUCCESS;
}

/* A block that was exported by this process comes back under the same handle with one more reference. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    struct allocation old, imported = {.references = 1, .kind = BLOCK, .card = NO_CARD, .shared = IMPORTED};
    struct export_lock export_lock;
    CUresult result = lease_ready() ? REAL(cuMemImportFromShareableHandle)(handle, shareable, type) : LEASE_BROKEN;
    if (result != CUDA_SUCCESS || allocations_retain(BLOCK, *handle))
        return result;
    imported.key = *handle;
    allocations_put(imported, &old);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && export_lock_read((int)(intptr_t)shareable, &export_lock))
        result = charge_import(*handle, export_lock.bytes);
    if (result != CUDA_SUCCESS)
        cuMemRelease(*handle);
    return result;
}

static void drop_reference(CUmemGenericAllocationHandle handle) {
    struct allocation block;
    bool last = free_begin(BLOCK, handle, &block);
    release_end(CUDA_SUCCESS, last, &block);
}

/* The reference is added before the driver call, because another thread may release the handle once it is mapped. */
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    struct allocation mapping = {.key = address, .bytes = bytes, .references = 1, .kind = MAPPING, .card = NO_CARD};
    struct allocation old;
    mapping.owner = allocations_retain(BLOCK, handle) ? handle : 0;
    CUresult result = mapping.owner ? charge_import(handle, bytes) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = REAL(cuMemMap)(address, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS)
        allocations_put(mapping, &old);
    else if (mapping.owner)
        drop_reference(handle);
    return result;
}

/* One call may unmap several adjacent mappings, but only whole ones. */
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct allocation mapping;
    CUresult result = REAL(cuMemUnmap)(address, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    for (CUdeviceptr at = address; at < address + bytes && free_begin(MAPPING, at, &mapping); at += mapping.bytes) {
        if (mapping.owner)
            drop_reference(mapping.owner);
    }
    return result;
}

/* Tiles of sparse arrays. The shim does not track which tile replaces which, so a block that was mapped as a tile
 * stays charged. */
static void retain_all(const CUarrayMapInfo *list, unsigned int count) {
    for (unsigned int i = 0; i < count; i++)
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            allocations_retain(BLOCK, list[i].memHandle.memHandle);
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync)(list, count, stream);
    if (result == CUDA_SUCCESS)
        retain_all(list, count);
    return result;
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    CUresult result = REAL(cuMemMapArrayAsync_ptsz)(list, count, stream);
    if (result == CUDA_SUCCESS)
        retain_all(list, count);
    return result;
}
