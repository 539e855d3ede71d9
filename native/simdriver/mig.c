#include "mig.h"

#include <stdio.h>
#include <string.h>

static const uint32_t compute_slices[] = {1, 2, 3, 4, 7, 8, 6, 1}; /* by NVML's number */
#define COMPUTE_PROFILES (sizeof compute_slices / sizeof *compute_slices)

const struct fenka_node_mig_profile *mig_profile_by_id(const struct fenka_node_mig *mig, uint32_t id) {
    for (uint32_t i = 0; i < mig->profile_count; i++)
        if (mig->profiles[i].id == id)
            return &mig->profiles[i];
    return NULL;
}

const struct fenka_node_mig_profile *mig_profile_by_kind(const struct fenka_node_mig *mig, uint32_t kind) {
    for (uint32_t i = 0; i < mig->profile_count; i++)
        if (mig->profiles[i].kind == kind)
            return &mig->profiles[i];
    return NULL;
}

const struct fenka_node_mig_profile *mig_profile_of(const struct fenka_node_mig *mig, uint32_t gpu) {
    return &mig->profiles[mig->gpus[gpu].profile];
}

bool mig_has_start(const struct fenka_node_mig_profile *profile, uint32_t start) {
    for (uint32_t i = 0; i < profile->start_count; i++)
        if (profile->starts[i] == start)
            return true;
    return false;
}

static uint32_t mask_of(uint32_t start, uint32_t size) { return ((1u << size) - 1) << start; }

struct use {
    uint32_t memory, slices, exclusive, same;
};

static struct use use_of(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile) {
    struct use use = {0};
    for (uint32_t id = 0; id < FENKA_NODE_MIG_GPU_INSTANCES; id++) {
        if (!mig->gpus[id].present)
            continue;
        const struct fenka_node_mig_profile *held = mig_profile_of(mig, id);
        use.memory |= mask_of(mig->gpus[id].start, held->size);
        use.slices += held->slices;
        use.exclusive |= held->exclusive;
        use.same += held == profile;
    }
    return use;
}

static bool has_room(const struct fenka_node_mig *mig, const struct use *use,
                     const struct fenka_node_mig_profile *profile, uint32_t start) {
    return !(use->memory & mask_of(start, profile->size)) && use->slices + profile->slices <= mig->slices &&
           use->same < profile->limit && !(profile->exclusive && use->exclusive);
}

unsigned mig_room(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile) {
    struct use use = use_of(mig, profile);
    unsigned count = 0;
    for (uint32_t i = 0; i < profile->start_count; i++) {
        if (!has_room(mig, &use, profile, profile->starts[i]))
            continue;
        use = (struct use){use.memory | mask_of(profile->starts[i], profile->size), use.slices + profile->slices,
                           use.exclusive | profile->exclusive, use.same + 1};
        count++;
    }
    return count;
}

bool mig_fits(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t start) {
    struct use use = use_of(mig, profile);
    return has_room(mig, &use, profile, start);
}

uint32_t mig_gpu_id(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t start) {
    uint32_t nodes = mig->axis / profile->size, node = start / profile->size;
    if (mig->mirrored && nodes > 1)
        node = (node + nodes / 2) % nodes;
    return nodes - 1 + node;
}

/* Multiprocessors of so many compute slices, as the GPU instance of that width has them. */
static uint32_t multiprocessors(const struct fenka_node_mig *mig, uint32_t slices) {
    for (uint32_t i = 0; i < mig->profile_count; i++)
        if (mig->profiles[i].slices == slices && !strchr(mig->profiles[i].name, '+'))
            return mig->profiles[i].sm_count;
    return 0;
}

static bool is_double(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile) {
    return profile->slices == 1 && profile->size == 2 * mig->profiles[0].size;
}

bool mig_compute_profile(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t kind,
                         struct mig_compute_profile *compute) {
    if (kind >= COMPUTE_PROFILES)
        return false;
    uint32_t slices = compute_slices[kind];
    bool whole = slices == profile->slices && (kind == MIG_DOUBLE_MEMORY) == is_double(mig, profile);
    uint32_t sm_count = whole ? profile->sm_count : multiprocessors(mig, slices);
    if (slices > profile->slices || sm_count == 0 || (kind == MIG_DOUBLE_MEMORY && !is_double(mig, profile)))
        return false;
    *compute = (struct mig_compute_profile){kind, slices, sm_count, profile->slices / slices};
    return true;
}

uint32_t mig_compute_start(const struct fenka_node_mig_profile *profile, const struct mig_compute_profile *compute,
                           unsigned n) {
    uint32_t step = compute->slices == 3 ? 4 : compute->slices;
    uint32_t start = n * step;
    return n < compute->limit && start + compute->slices <= profile->slices ? start : MIG_NO_START;
}

bool mig_compute_fits(const struct fenka_node_mig_gpu *gpu, uint32_t start, uint32_t slices) {
    for (uint32_t id = 0; id < FENKA_NODE_MIG_COMPUTE_INSTANCES; id++) {
        const struct fenka_node_mig_compute *held = &gpu->compute[id];
        if (held->present && mask_of(held->start, held->slices) & mask_of(start, slices))
            return false;
    }
    return true;
}

bool mig_instance_at(const struct fenka_node_mig *mig, unsigned n, struct mig_instance *instance) {
    for (uint32_t gpu = 0; gpu < FENKA_NODE_MIG_GPU_INSTANCES; gpu++)
        for (uint32_t id = 0; id < FENKA_NODE_MIG_COMPUTE_INSTANCES; id++)
            if (mig_present(mig, (struct mig_instance){gpu, id}) && n-- == 0) {
                *instance = (struct mig_instance){gpu, id};
                return true;
            }
    return false;
}

bool mig_present(const struct fenka_node_mig *mig, struct mig_instance instance) {
    const struct fenka_node_mig_gpu *gpu = &mig->gpus[instance.gpu];
    return __atomic_load_n(&gpu->present, __ATOMIC_ACQUIRE) &&
           __atomic_load_n(&gpu->compute[instance.compute].present, __ATOMIC_ACQUIRE);
}

uint32_t mig_mark(struct mig_instance instance) {
    return 1 + (instance.gpu << FENKA_NODE_MIG_INSTANCE_SHIFT | instance.compute);
}

bool mig_unmark(uint32_t mark, struct mig_instance *instance) {
    if (mark == 0)
        return false;
    instance->gpu = (mark - 1) >> FENKA_NODE_MIG_INSTANCE_SHIFT;
    instance->compute = (mark - 1) & (FENKA_NODE_MIG_COMPUTE_INSTANCES - 1);
    return true;
}

/* FNV-1a, twice with different beginnings. */
static uint64_t hash(uint64_t value, const char *text) {
    for (; *text; text++)
        value = (value ^ (unsigned char)*text) * 1099511628211ull;
    return value;
}

void mig_uuid(char text[48], const struct fenka_node_card *card, const struct fenka_node_mig *mig,
              struct mig_instance instance) {
    const struct fenka_node_mig_gpu *gpu = &mig->gpus[instance.gpu];
    const struct fenka_node_mig_compute *compute = &gpu->compute[instance.compute];
    char shape[128];
    snprintf(shape, sizeof shape, "%s/%s/%u/%u/%u", card->uuid, mig->profiles[gpu->profile].name, gpu->start,
             compute->kind, compute->start);
    uint64_t high = hash(14695981039346656037ull, shape), low = hash(high, shape);
    snprintf(text, 48, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned)(high >> 32), (unsigned)(high >> 16 & 0xffff),
             (unsigned)(high & 0xfff), (unsigned)(0x8000 | (low >> 48 & 0x3fff)),
             (unsigned long long)(low & 0xffffffffffff));
}

void mig_name(char text[32], const struct fenka_node_mig_profile *profile, uint32_t slices) {
    if (slices == profile->slices)
        snprintf(text, 32, "%.24s", profile->name);
    else
        snprintf(text, 32, "%uc.%.24s", slices, profile->name);
}

void mig_device_name(char text[112], const struct fenka_node_card *card, const struct fenka_node_mig *mig,
                     struct mig_instance instance) {
    char name[32];
    uint32_t slices = mig->gpus[instance.gpu].compute[instance.compute].slices;
    mig_name(name, mig_profile_of(mig, instance.gpu), slices);
    snprintf(text, 112, "%s MIG %s", card->name, name);
}
