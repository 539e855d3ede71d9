/* Faults that tests and demonstrations provoke on cards. */
#define _GNU_SOURCE
#include "cardserver.h"

#include <errno.h>
#include <string.h>

/* As nvml.h numbers them, which this program is not compiled with. */
#define EVENT_SINGLE_BIT 1
#define EVENT_DOUBLE_BIT 2
#define EVENT_XID 8
/* XIDs that NVIDIA's driver reports with an uncorrected error, and for a card that has fallen off the bus. */
#define XID_DOUBLE_BIT 48
#define XID_LOST 79

static int count_ecc(uint32_t card, int kind, int64_t errors) {
    struct fenka_node_faults *faults = &state->faults[card];
    if (!faults->ecc)
        return EOPNOTSUPP;
    if (errors < 1 || errors > UINT32_MAX)
        return EINVAL;
    __atomic_fetch_add(&faults->ecc_volatile[kind], (uint64_t)errors, __ATOMIC_RELAXED);
    __atomic_fetch_add(&faults->ecc_aggregate[kind], (uint64_t)errors, __ATOMIC_RELAXED);
    report_event(kind ? EVENT_DOUBLE_BIT : EVENT_SINGLE_BIT, card, 0);
    if (kind)
        report_event(EVENT_XID, card, XID_DOUBLE_BIT);
    return 0;
}

static int set_temperature(struct fenka_node_faults *faults, int64_t celsius) {
    if (celsius < 0 || celsius > 200)
        return EINVAL;
    faults->temperature_c = (int32_t)celsius;
    __atomic_store_n(&faults->hot, 1, __ATOMIC_RELEASE);
    return 0;
}

int provoke(const struct node_command *command) {
    uint32_t card = command->card;
    if (card >= state->card_count)
        return ENODEV;
    struct fenka_node_faults *faults = &state->faults[card];
    switch (command->act) {
    case FENKA_NODE_TEMPERATURE:
        return set_temperature(faults, command->value);
    case FENKA_NODE_NO_TEMPERATURE:
        __atomic_store_n(&faults->hot, 0, __ATOMIC_RELEASE);
        return 0;
    case FENKA_NODE_ECC_CORRECTED:
        return count_ecc(card, 0, command->value);
    case FENKA_NODE_ECC_UNCORRECTED:
        return count_ecc(card, 1, command->value);
    case FENKA_NODE_XID:
        if (command->value < 1 || command->value > UINT16_MAX)
            return EINVAL;
        report_event(EVENT_XID, card, (uint64_t)command->value);
        return 0;
    case FENKA_NODE_LOSE:
        if (!__atomic_exchange_n(&faults->lost, 1, __ATOMIC_ACQ_REL))
            report_event(EVENT_XID, card, XID_LOST);
        return 0;
    case FENKA_NODE_RECOVER:
        if (faults->lost)
            recover(faults);
        return mig_reset(card) && state->mig[card].pending != state->mig[card].enabled ? EBUSY : 0;
    default:
        return EINVAL;
    }
}
