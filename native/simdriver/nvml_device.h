/* The interfaces between the parts of the simulated NVML. */
#ifndef FENKA_SIMULATED_NVML_DEVICE_H
#define FENKA_SIMULATED_NVML_DEVICE_H
#include "nvml_header.h"

#include <stdint.h>

#include "mig.h"
#include "node.h"

#define TRY(call)                     \
    do {                              \
        nvmlReturn_t tried_ = (call); \
        if (tried_ != NVML_SUCCESS)   \
            return tried_;            \
    } while (0)

/* nvml_state.c: calls of nvmlInit that nvmlShutdown has not matched yet; between nvml_enter and nvml_leave. */
extern unsigned nvml_users;
void nvml_enter(void);
void nvml_leave(void);
nvmlReturn_t nvml_attach(void);
/* NVML_ERROR_UNINITIALIZED before nvmlInit, NVML_ERROR_GPU_IS_LOST once the card server has ended. */
nvmlReturn_t nvml_ready(void);
/* A handle stays valid over a fork and a shutdown, as with the real NVML. NVML_ERROR_GPU_IS_LOST if the card has
 * fallen off the bus. */
nvmlReturn_t nvml_card(nvmlDevice_t device, uint32_t *card);
nvmlDevice_t nvml_handle(uint32_t card);
/* The place of a card, also of a lost one. */
nvmlReturn_t nvml_pci(uint32_t card, nvmlPciInfo_t *pci);
/* What a handle stands for: a card, or an instance that is a device of its own. Functions that instances do not have
 * use nvml_card, which returns NVML_ERROR_NOT_SUPPORTED for them. */
struct nvml_target {
    uint32_t card;
    bool mig, of_compute;
    struct mig_instance instance;
};
nvmlReturn_t nvml_target(nvmlDevice_t device, struct nvml_target *target);
bool nvml_is_mig(nvmlDevice_t device);
bool nvml_mig_by_uuid(const char *uuid, nvmlDevice_t *device);
/* nvml_topology.c: how many NVLinks of the card are connected. */
uint32_t nvml_link_count(uint32_t card);
/* Frees every event set, and wakes the threads that wait in one. */
void nvml_events_end(void);
/* A function that returns one value of a card; the expression may use `index` and `card`. */
#define NVML_GETTER(name, type, expression)                             \
    nvmlReturn_t name(nvmlDevice_t device, type *value) {               \
        uint32_t index;                                                 \
        TRY(nvml_card(device, &index));                                 \
        if (!value)                                                     \
            return NVML_ERROR_INVALID_ARGUMENT;                         \
        const struct fenka_node_card *card = &node_state->cards[index]; \
        (void)card;                                                     \
        *value = (expression);                                          \
        return NVML_SUCCESS;                                            \
    }
/* Another name of the function above. */
#define NVML_ALIAS(name, type, of) \
    nvmlReturn_t name(nvmlDevice_t device, type *value) { return of(device, value); }

nvmlReturn_t nvml_text(char *to, unsigned length, const char *text);
#endif
