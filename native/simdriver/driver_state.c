/* The devices that the process sees, and whether it may use the simulated node. */
#include <stdlib.h>

#include "driver.h"
#include "sim_memory.h"

bool driver_initialised;
int device_count;
uint32_t device_cards[FENKA_NODE_CARDS];

uint32_t environment_number(const char *name, uint32_t otherwise) {
    const char *text = getenv(name);
    char *end;
    unsigned long value = text ? strtoul(text, &end, 10) : 0;
    return !text || end == text || *end || value > UINT32_MAX ? otherwise : (uint32_t)value;
}

CUresult driver_ready(void) {
    if (!driver_initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    return node_alive() ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_NOT_READY;
}

bool device_instance(uint32_t card, struct mig_instance *instance) {
    return mig_unmark(sim_memory_mark(card), instance);
}

bool device_present(uint32_t card) {
    struct mig_instance instance;
    const struct fenka_node_mig *mig = &node_state->mig[card];
    return device_instance(card, &instance) ? mig_present(mig, instance)
                                            : !__atomic_load_n(&mig->enabled, __ATOMIC_ACQUIRE);
}

uint32_t device_multiprocessors(uint32_t card) {
    struct mig_instance instance;
    return device_instance(card, &instance)
               ? node_state->mig[card].gpus[instance.gpu].compute[instance.compute].sm_count
               : node_state->cards[card].sm_count;
}

uint64_t device_duration(uint32_t card, uint64_t duration_ns) {
    uint32_t own = device_multiprocessors(card);
    return own ? duration_ns * node_state->cards[card].sm_count / own : duration_ns;
}

uint32_t device_memory(uint32_t card) {
    struct mig_instance instance;
    return device_instance(card, &instance) ? card | (instance.gpu + 1) << 8 : card;
}

CUresult device_card(CUdevice device, uint32_t *card) {
    TRY(driver_ready());
    if (device < 0 || device >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *card = device_cards[device];
    return card_ready(*card);
}
