/* The devices that the process sees, and whether it may use the simulated node. */
#include <stdlib.h>

#include "driver.h"

bool driver_initialised;
int device_count;
uint32_t device_cards[FENKA_NODE_CARDS];

uint32_t environment_number(const char *name, uint32_t otherwise)
{
    const char *text = getenv(name);
    char *end;
    unsigned long value = text ? strtoul(text, &end, 10) : 0;
    return !text || end == text || *end || value > UINT32_MAX ? otherwise : (uint32_t)value;
}

CUresult driver_ready(void)
{
    if (!driver_initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    return node_alive() ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult device_card(CUdevice device, uint32_t *card)
{
    TRY(driver_ready());
    if (device < 0 || device >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *card = device_cards[device];
    return card_ready(*card);
}
