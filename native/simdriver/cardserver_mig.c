/* MIG: the only writer of a card's instances, so that every change is atomic and all processes see the same. */
#include <errno.h>
#include <string.h>

#include "cardserver.h"
#include "mig.h"

/* As nvml.h numbers it, which this program is not compiled with. */
#define EVENT_MIG_CONFIG_CHANGE 0x100

static void changed(uint32_t card) {
    tree_update(card);
    report_event(EVENT_MIG_CONFIG_CHANGE, card, 0);
}

static bool used_by_process(uint32_t card, uint32_t mark) {
    for (uint32_t slot = 0; slot < FENKA_NODE_SLOTS; slot++) {
        const struct fenka_node_process *process = &state->processes[slot];
        if (process->generation != 0 && process->contexts[card] > 0 && (mark == 0 || process->instances[card] == mark))
            return true;
    }
    return false;
}

static bool has_instances(const struct fenka_node_mig *mig) {
    for (uint32_t id = 0; id < FENKA_NODE_MIG_GPU_INSTANCES; id++)
        if (mig->gpus[id].present)
            return true;
    return false;
}

int mig_reset(uint32_t card) {
    struct fenka_node_mig *mig = &state->mig[card];
    if (mig->profile_count == 0)
        return 0;
    if (used_by_process(card, 0))
        return EBUSY;
    for (uint32_t gpu = 0; gpu < FENKA_NODE_MIG_GPU_INSTANCES; gpu++) {
        __atomic_store_n(&mig->gpus[gpu].present, 0, __ATOMIC_RELEASE);
        for (uint32_t id = 0; id < FENKA_NODE_MIG_COMPUTE_INSTANCES; id++)
            __atomic_store_n(&mig->gpus[gpu].compute[id].present, 0, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&mig->enabled, mig->pending, __ATOMIC_RELEASE);
    tree_update(card);
    return 0;
}

void mig_boot(void) {
    for (uint32_t card = 0; card < state->card_count; card++) {
        struct fenka_node_mig *mig = &state->mig[card];
        mig->pending = mig->keeps_mode ? mig->pending : 0;
        mig->needs_reset = mig->failures = 0;
        mig_reset(card);
    }
}

/* EBUSY = it is pending because the card is in use, EAGAIN = it is pending until a reset. */
static int set_mode(uint32_t card, int64_t mode) {
    struct fenka_node_mig *mig = &state->mig[card];
    if (mode != 0 && mode != 1)
        return EINVAL;
    mig->pending = (uint32_t)mode;
    if (mig->enabled == mig->pending)
        return 0;
    if (mig->needs_reset)
        return EAGAIN;
    if (used_by_process(card, 0) || has_instances(mig))
        return EBUSY;
    mig_reset(card);
    report_event(EVENT_MIG_CONFIG_CHANGE, card, 0);
    return 0;
}

static bool fails(struct fenka_node_mig *mig) {
    bool failing = mig->failures > 0;
    mig->failures -= failing;
    return failing;
}

static uint32_t own_choice(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile) {
    for (uint32_t i = 0; i < profile->start_count; i++)
        if (mig_fits(mig, profile, profile->choice[i]))
            return profile->choice[i];
    return MIG_NO_START;
}

static struct node_answer create_gpu(struct fenka_node_mig *mig, int64_t value) {
    const struct fenka_node_mig_profile *profile = mig_profile_by_id(mig, value & 0xff);
    uint32_t start = (uint32_t)(value >> 8) - 1;
    if (!profile || (start != MIG_NO_START && !mig_has_start(profile, start)))
        return (struct node_answer){EINVAL, 0};
    if (start == MIG_NO_START)
        start = own_choice(mig, profile);
    if (start == MIG_NO_START || !mig_fits(mig, profile, start) || fails(mig))
        return (struct node_answer){ENOSPC, 0};
    uint32_t id = mig_gpu_id(mig, profile, start);
    struct fenka_node_mig_gpu *gpu = &mig->gpus[id];
    gpu->profile = (uint32_t)(profile - mig->profiles);
    gpu->start = start;
    gpu->generation++;
    __atomic_store_n(&gpu->present, 1, __ATOMIC_RELEASE);
    return (struct node_answer){0, id};
}

static struct node_answer create_compute(struct fenka_node_mig *mig, struct fenka_node_mig_gpu *gpu, int64_t value) {
    const struct fenka_node_mig_profile *profile = &mig->profiles[gpu->profile];
    struct mig_compute_profile compute;
    if (!mig_compute_profile(mig, profile, value >> 8 & 0xff, &compute))
        return (struct node_answer){EOPNOTSUPP, 0};
    uint32_t wanted = (uint32_t)(value >> 16) - 1, start = MIG_NO_START;
    bool known = wanted == MIG_NO_START;
    for (unsigned n = 0; n < compute.limit && start == MIG_NO_START; n++) {
        uint32_t at = mig_compute_start(profile, &compute, n);
        known |= at != MIG_NO_START && at == wanted;
        if (at != MIG_NO_START && (wanted == MIG_NO_START || at == wanted) && mig_compute_fits(gpu, at, compute.slices))
            start = at;
    }
    if (!known)
        return (struct node_answer){EINVAL, 0};
    uint32_t id = 0;
    while (id < FENKA_NODE_MIG_COMPUTE_INSTANCES && gpu->compute[id].present)
        id++;
    if (start == MIG_NO_START || id == FENKA_NODE_MIG_COMPUTE_INSTANCES || fails(mig))
        return (struct node_answer){ENOSPC, 0};
    struct fenka_node_mig_compute *made = &gpu->compute[id];
    made->kind = compute.kind;
    made->start = start;
    made->slices = compute.slices;
    made->sm_count = compute.sm_count;
    made->generation++;
    __atomic_store_n(&made->present, 1, __ATOMIC_RELEASE);
    return (struct node_answer){0, id};
}

static int destroy_gpu(struct fenka_node_mig_gpu *gpu) {
    for (uint32_t id = 0; id < FENKA_NODE_MIG_COMPUTE_INSTANCES; id++)
        if (gpu->compute[id].present)
            return EBUSY;
    __atomic_store_n(&gpu->present, 0, __ATOMIC_RELEASE);
    return 0;
}

static int destroy_compute(uint32_t card, struct fenka_node_mig_gpu *gpu, uint32_t gpu_id, uint32_t id) {
    if (id >= FENKA_NODE_MIG_COMPUTE_INSTANCES || !gpu->compute[id].present)
        return ENOENT;
    if (used_by_process(card, mig_mark((struct mig_instance){gpu_id, id})))
        return EBUSY;
    __atomic_store_n(&gpu->compute[id].present, 0, __ATOMIC_RELEASE);
    return 0;
}

/* Commands about a GPU instance that exists. */
static struct node_answer run_inside(const struct node_command *command, struct fenka_node_mig *mig) {
    uint32_t id = command->value & 0xff;
    struct fenka_node_mig_gpu *gpu = &mig->gpus[id];
    if (id >= FENKA_NODE_MIG_GPU_INSTANCES || !gpu->present)
        return (struct node_answer){ENOENT, 0};
    switch (command->act) {
    case FENKA_NODE_MIG_DESTROY_GI:
        return (struct node_answer){destroy_gpu(gpu), 0};
    case FENKA_NODE_MIG_CREATE_CI:
        return create_compute(mig, gpu, command->value);
    case FENKA_NODE_MIG_DESTROY_CI:
        return (struct node_answer){destroy_compute(command->card, gpu, id, command->value >> 8 & 0xff), 0};
    default:
        return (struct node_answer){EINVAL, 0};
    }
}

struct node_answer mig_run(const struct node_command *command) {
    if (command->card >= state->card_count)
        return (struct node_answer){ENODEV, 0};
    struct fenka_node_mig *mig = &state->mig[command->card];
    if (mig->profile_count == 0)
        return (struct node_answer){EOPNOTSUPP, 0};
    if (command->act == FENKA_NODE_MIG_PENDING || command->act == FENKA_NODE_MIG_FAIL) {
        if (command->value < 0 || command->value > UINT16_MAX)
            return (struct node_answer){EINVAL, 0};
        *(command->act == FENKA_NODE_MIG_FAIL ? &mig->failures : &mig->needs_reset) = (uint32_t)command->value;
        return (struct node_answer){0, 0};
    }
    if (command->act == FENKA_NODE_MIG_MODE)
        return (struct node_answer){set_mode(command->card, command->value), 0};
    if (!mig->enabled)
        return (struct node_answer){EOPNOTSUPP, 0};
    struct node_answer answer =
        command->act == FENKA_NODE_MIG_CREATE_GI ? create_gpu(mig, command->value) : run_inside(command, mig);
    if (answer.error == 0)
        changed(command->card);
    return answer;
}
