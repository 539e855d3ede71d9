/* Pieces of device memory that processes show each other, for cuda_ipc.c. */
#ifndef FENKA_SIMULATED_IPC_SHARE_H
#define FENKA_SIMULATED_IPC_SHARE_H
#include "driver.h"

/* What an IPC handle contains. */
struct ipc_handle {
    uint32_t magic, card;
    uint8_t token[NODE_TOKEN];
    uint64_t offset, size;
};
_Static_assert(sizeof(struct ipc_handle) <= CU_IPC_HANDLE_SIZE, "fits the public handle");

/* Puts the secret name of this process's device memory into the handle. False if the card server does not answer. */
bool ipc_publish(struct ipc_handle *handle);
/* Whether the handle is of this process's own memory. */
bool ipc_is_own(const struct ipc_handle *handle);
/* Maps the piece; 0 if that fails. */
uintptr_t ipc_map(const struct ipc_handle *handle);
void ipc_unmap(uintptr_t base, size_t bytes);
#endif
