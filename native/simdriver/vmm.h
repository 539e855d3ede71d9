/* Physical memory of the virtual memory management, for the files that implement it. */
#ifndef FENKA_SIMULATED_VMM_H
#define FENKA_SIMULATED_VMM_H
#include "driver.h"

#define GRANULARITY (2u << 20)

struct memory_handle {
    struct object object;
    CUmemAllocationProp properties;
    uint32_t card;
    size_t size, charged;
    int file;
    int line; /* to the card server, once it was exported */
    off_t offset;
    unsigned references, mappings;
    bool own_file, exported;
};

static inline bool on_device(const CUmemAllocationProp *properties) {
    return properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

/* Taken before the lock of memory.c, where both are. */
void vmm_lock(void);
void vmm_unlock(void);

/* Under the lock. NULL if the handle was released, even if its memory is still mapped. */
struct memory_handle *vmm_handle(CUmemGenericAllocationHandle handle);
/* Under the lock, after a reference or a mapping was removed. */
void vmm_drop_if_unused(struct memory_handle *handle);
#endif
