/* What follows from a card's MIG state: which instances fit, their ids and names. It changes nothing. */
#ifndef FENKA_SIMULATED_MIG_H
#define FENKA_SIMULATED_MIG_H
#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

#define MIG_NO_START UINT32_MAX
#define MIG_DOUBLE_MEMORY 7 /* the compute profile that only GPU instances of double memory have */

struct mig_compute_profile {
    uint32_t kind; /* NVML's number, which is also nvidia-smi's */
    uint32_t slices, sm_count, limit;
};

/* An instance that a program can use: a compute instance in its GPU instance. */
struct mig_instance {
    uint32_t gpu, compute;
};

/* NULL if the card has none. */
const struct fenka_node_mig_profile *mig_profile_by_id(const struct fenka_node_mig *mig, uint32_t id);
const struct fenka_node_mig_profile *mig_profile_by_kind(const struct fenka_node_mig *mig, uint32_t kind);
const struct fenka_node_mig_profile *mig_profile_of(const struct fenka_node_mig *mig, uint32_t gpu);
bool mig_has_start(const struct fenka_node_mig_profile *profile, uint32_t start);
/* Whether a GPU instance can be created there. */
bool mig_fits(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t start);
/* How many more GPU instances of this profile alone fit. */
unsigned mig_room(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile);
uint32_t mig_gpu_id(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t start);

/* Whether GPU instances of this profile offer the compute profile; fills it in. */
bool mig_compute_profile(const struct fenka_node_mig *mig, const struct fenka_node_mig_profile *profile, uint32_t kind,
                         struct mig_compute_profile *compute);
/* The n-th place of a compute profile in its GPU instance; MIG_NO_START = there is none. */
uint32_t mig_compute_start(const struct fenka_node_mig_profile *profile, const struct mig_compute_profile *compute,
                           unsigned n);
bool mig_compute_fits(const struct fenka_node_mig_gpu *gpu, uint32_t start, uint32_t slices);

/* The n-th compute instance of a card, by GPU instance, then by compute instance. */
bool mig_instance_at(const struct fenka_node_mig *mig, unsigned n, struct mig_instance *instance);
bool mig_present(const struct fenka_node_mig *mig, struct mig_instance instance);
/* What a process notes of itself, see fenka_node_process. */
uint32_t mig_mark(struct mig_instance instance);
bool mig_unmark(uint32_t mark, struct mig_instance *instance);
/* "MIG-…": of the card, the place and the shape, and so the same when the instance is made again. */
void mig_uuid(char text[48], const struct fenka_node_card *card, const struct fenka_node_mig *mig,
              struct mig_instance instance);
/* "1g.5gb", "1c.3g.20gb": of so many compute slices in a GPU instance of this profile. */
void mig_name(char text[32], const struct fenka_node_mig_profile *profile, uint32_t slices);
/* "NVIDIA A100-SXM4-40GB MIG 1g.5gb". */
void mig_device_name(char text[112], const struct fenka_node_card *card, const struct fenka_node_mig *mig,
                     struct mig_instance instance);
#endif
