#include "context_state.h"

#include <string.h>

#include "fenka/lease.h"

uint32_t context_deaths;

static uint64_t primary[FENKA_MAX_CARDS];

uint64_t context_primary(unsigned card) { return __atomic_load_n(&primary[card], __ATOMIC_RELAXED); }

uint64_t context_set_primary(unsigned card, uint64_t context) {
    return __atomic_exchange_n(&primary[card], context, __ATOMIC_RELAXED);
}

void context_state_reset(void) { memset(primary, 0, sizeof primary); }
