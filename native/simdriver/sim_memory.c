#include "sim_memory.h"

#include <sched.h>

#include "mig.h"
#include "node.h"

/* Two processes that charge at once see each other's charge, and may both be refused although one would fit. So a
 * charge is retried before it is refused. */
#define TRIES 4

uint64_t rounded_up(uint64_t bytes, uint64_t unit) {
    return bytes > UINT64_MAX - unit ? UINT64_MAX : (bytes + unit - 1) / unit * unit;
}

uint64_t sim_memory_taken(uint64_t bytes) {
    return rounded_up(bytes, bytes > CARD_SHARES_PAGES ? CARD_PAGE : CARD_GRANULE);
}

uint64_t sim_memory_total(uint32_t card) {
    uint64_t sum = 0;
    uint32_t used = __atomic_load_n(&node_state->slots_used, __ATOMIC_ACQUIRE);
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++)
        sum += __atomic_load_n(&node_state->memory[card][slot], __ATOMIC_SEQ_CST);
    return sum;
}

uint64_t sim_memory_size(uint32_t card, uint32_t mark) {
    struct mig_instance instance;
    if (!mig_unmark(mark, &instance))
        return node_state->cards[card].memory_bytes - node_state->cards[card].reserved_bytes;
    return (uint64_t)mig_profile_of(&node_state->mig[card], instance.gpu)->memory_mib << 20;
}

/* Memory belongs to the GPU instance; its compute instances share it. */
uint64_t sim_memory_used(uint32_t card, uint32_t mark) {
    struct mig_instance wanted, held;
    if (!mig_unmark(mark, &wanted))
        return sim_memory_total(card);
    uint64_t sum = 0;
    uint32_t used = __atomic_load_n(&node_state->slots_used, __ATOMIC_ACQUIRE);
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++)
        if (mig_unmark(__atomic_load_n(&node_state->processes[slot].instances[card], __ATOMIC_ACQUIRE), &held) &&
            held.gpu == wanted.gpu)
            sum += __atomic_load_n(&node_state->memory[card][slot], __ATOMIC_SEQ_CST);
    return sum;
}

uint32_t sim_memory_mark(uint32_t card) { return node_state->processes[node_slot].instances[card]; }

bool sim_memory_charge(uint32_t card, uint64_t bytes) {
    uint32_t mark = sim_memory_mark(card);
    uint64_t whole = sim_memory_size(card, mark);
    if (bytes > whole || !node_owns_slot())
        return false;
    uint64_t *held = &node_state->memory[card][node_slot];
    for (int try = 0; try < TRIES; try++) {
        __atomic_fetch_add(held, bytes, __ATOMIC_SEQ_CST);
        if (sim_memory_used(card, mark) <= whole)
            return true;
        __atomic_fetch_sub(held, bytes, __ATOMIC_SEQ_CST);
        sched_yield();
    }
    return false;
}

void sim_memory_release(uint32_t card, uint64_t bytes) {
    if (node_owns_slot())
        __atomic_fetch_sub(&node_state->memory[card][node_slot], bytes, __ATOMIC_SEQ_CST);
}
