#include "charge.h"

#include "account.h"
#include "account_page.h"
#include "context_state.h"
#include "deferred_release.h"
#include "pools.h"

CUresult charge_alone(const struct target *target, uint64_t bytes) {
    /* Zero bytes are granted even when the cap has been lowered below what is held. */
    if (bytes == 0 || target->card == NO_CARD || account_charge(target->card, bytes))
        return CUDA_SUCCESS;
    bool freed = deferred_poll();
    freed |= pools_poll(true);
    if (freed && account_charge(target->card, bytes))
        return CUDA_SUCCESS;
    account_count_refusal(target->card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void discharge_bytes(uint8_t card, uint64_t bytes) {
    if (card != NO_CARD)
        account_discharge(card, bytes);
}

__attribute__((noinline, cold)) static void discharge_shared(const struct allocation *freed) {
    if (freed->kind == IPC_IMPORT) {
        account_unimport(freed->card, freed->bytes);
    } else if (freed->shared == EXPORTED) {
        account_release_exported(freed->card, freed->bytes);
    } else if (freed->shared == POOLED) {
        pools_set_stale();
    } else { /* of a graph node, or left over from a launch */
        pools_graph_remove(freed->card, freed->bytes);
    }
}

void discharge_allocation(const struct allocation *freed) {
    if (freed->card == NO_CARD)
        return;
    if (__builtin_expect(freed->shared || freed->kind == IPC_IMPORT || freed->kind == NODE, 0))
        discharge_shared(freed);
    else
        account_discharge(freed->card, freed->bytes);
}

void discharge_owned(uint64_t context) {
    struct allocation freed;
    unsigned shard = 0;
    __atomic_fetch_add(&context_deaths, 1, __ATOMIC_RELEASE);
    while (context && allocations_take_owned(&shard, context, &freed))
        discharge_allocation(&freed);
    pools_set_stale();
    pools_poll(false);
}

CUresult charge_commit_as(CUresult result, const struct target *target, uint64_t bytes, enum kind kind, uint64_t key,
                          uint8_t shared) {
    struct allocation old;
    if (result != CUDA_SUCCESS) {
        discharge_bytes(target->card, bytes);
        return result;
    }
    allocations_put((struct allocation){.key = key,
                                        .bytes = bytes,
                                        .owner = target->owner,
                                        .references = 1,
                                        .kind = kind,
                                        .card = target->card,
                                        .shared = shared},
                    &old);
    if (__builtin_expect(old.kind != NOTHING, 0))
        discharge_allocation(&old);
    return result;
}

bool free_begin(enum kind kind, uint64_t key, struct allocation *allocation) {
    return allocations_release(kind, key, allocation);
}

CUresult free_end(CUresult result, bool last, const struct allocation *allocation) {
    struct allocation old;
    if (!last)
        return result;
    if (result == CUDA_SUCCESS) {
        discharge_allocation(allocation);
        return result;
    }
    struct allocation restored = *allocation;
    restored.references = 1;
    allocations_put(restored, &old);
    return result;
}
