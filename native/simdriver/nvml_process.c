/* The processes that use a card. PIDs are as the card server sees them, in whatever namespace the caller is. */
#include <pthread.h>
#include <time.h>

#include "nvml_device.h"
#include "timeline.h"

struct seen {
    uint32_t slot;
    unsigned pid;
    uint64_t bytes;
    uint32_t mark; /* its instance */
};

/* Processes with a context on the card; like with the real NVML, cuInit alone is not enough, and memory that an ended
 * process left to its children belongs to nobody. */
static unsigned collect(uint32_t card, struct seen *list) {
    unsigned count = 0;
    uint32_t used = __atomic_load_n(&node_state->slots_used, __ATOMIC_ACQUIRE);
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++) {
        const struct fenka_node_process *process = &node_state->processes[slot];
        uint64_t generation = __atomic_load_n(&process->generation, __ATOMIC_ACQUIRE);
        struct seen found = {slot, (unsigned)process->pid,
                             __atomic_load_n(&node_state->memory[card][slot], __ATOMIC_RELAXED),
                             __atomic_load_n(&process->instances[card], __ATOMIC_RELAXED)};
        bool holds = __atomic_load_n(&process->contexts[card], __ATOMIC_RELAXED) > 0 &&
                     !__atomic_load_n(&process->ended, __ATOMIC_RELAXED);
        /* Read again: the slot may have changed hands while it was read. */
        if (generation != 0 && holds && __atomic_load_n(&process->generation, __ATOMIC_ACQUIRE) == generation)
            list[count++] = found;
    }
    return count;
}

/* Those of a card, or of one of its instances. */
static nvmlReturn_t collect_of(nvmlDevice_t device, struct seen *list, unsigned *count) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    unsigned all = collect(target.card, list), kept = 0;
    for (unsigned i = 0; i < all; i++)
        if (!target.mig || list[i].mark == mig_mark(target.instance))
            list[kept++] = list[i];
    *count = kept;
    return NVML_SUCCESS;
}

static nvmlReturn_t fits(unsigned *room, unsigned count, const void *list) {
    bool enough = *room >= count && (list || count == 0);
    *room = count;
    return enough ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *list) {
    struct seen found[FENKA_NODE_SLOTS];
    unsigned count;
    TRY(collect_of(device, found, &count));
    if (!room)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(fits(room, count, list));
    for (unsigned i = 0; i < count; i++) {
        struct mig_instance instance = {UINT32_MAX, UINT32_MAX};
        mig_unmark(found[i].mark, &instance);
        list[i] = (nvmlProcessInfo_t){.pid = found[i].pid,
                                      .usedGpuMemory = found[i].bytes,
                                      .gpuInstanceId = instance.gpu,
                                      .computeInstanceId = instance.compute};
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *room,
                                                     nvmlProcessInfo_v2_t *list) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, room, list);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_v1_t *list) {
    struct seen found[FENKA_NODE_SLOTS];
    unsigned count;
    TRY(collect_of(device, found, &count));
    if (!room)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(fits(room, count, list));
    for (unsigned i = 0; i < count; i++)
        list[i] = (nvmlProcessInfo_v1_t){.pid = found[i].pid, .usedGpuMemory = found[i].bytes};
    return NVML_SUCCESS;
}

/* There are no graphics processes, and no MPS. */
static nvmlReturn_t nobody(nvmlDevice_t device, unsigned int *room) {
    struct nvml_target target;
    TRY(nvml_target(device, &target));
    if (!room)
        return NVML_ERROR_INVALID_ARGUMENT;
    *room = 0;
    return NVML_SUCCESS;
}

#define NOBODY(name, type)                                                   \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *room, type *list) { \
        (void)list;                                                          \
        return nobody(device, room);                                         \
    }
NOBODY(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

/* Recent samples. A caller that queries repeatedly, each time from its last sample on, gets exactly the time in
 * between; other callers get the last second. */
#define ANSWERS 4

struct answer {
    unsigned long long at_us; /* 0 = none */
    uint64_t generations[FENKA_NODE_SLOTS], busy_ns[FENKA_NODE_SLOTS];
};

static pthread_mutex_t answering = PTHREAD_MUTEX_INITIALIZER;
static struct {
    struct answer answers[ANSWERS];
    unsigned count;
} asked[FENKA_NODE_CARDS];

static const struct answer *answer_at(uint32_t card, unsigned long long at_us) {
    for (unsigned i = 0; i < ANSWERS; i++)
        if (at_us && asked[card].answers[i].at_us == at_us)
            return &asked[card].answers[i];
    return NULL;
}

/* Percent of the time since a sample. */
static unsigned since(const struct answer *then, unsigned long long now_us, uint32_t slot, uint64_t generation,
                      uint64_t had) {
    uint64_t before = then->generations[slot] == generation ? then->busy_ns[slot] : 0;
    uint64_t window = (now_us - then->at_us) * 1000;
    uint64_t percent = had > before ? ((had - before) * 100 + window / 2) / window : 0;
    return percent < 100 ? (unsigned)percent : 100;
}

/* The driver's samples outlive their processes: appends those that ended since the sample, or in the last second. */
static unsigned add_past(uint32_t card, const struct answer *then, const struct answer *now, struct seen *found,
                         unsigned *percents, unsigned count) {
    uint64_t now_ns = node_now(), window_ns = then ? (now->at_us - then->at_us) * 1000 : 1000000000;
    for (unsigned i = 0; i < FENKA_NODE_PAST && count < FENKA_NODE_SLOTS; i++) {
        struct fenka_node_past past = node_state->past[i];
        if (!past.generation || past.card != card || past.ended_ns + window_ns < now_ns ||
            __atomic_load_n(&node_state->past[i].generation, __ATOMIC_SEQ_CST) != past.generation)
            continue;
        found[count] = (struct seen){.slot = past.slot, .pid = (unsigned)past.pid};
        percents[count++] = then ? since(then, now->at_us, past.slot, past.generation, past.busy_ns)
                                 : (unsigned)((past.last_second_ns + 5000000) / 10000000);
    }
    return count;
}

static unsigned measure(uint32_t card, struct seen *found, unsigned count, unsigned *percents,
                        unsigned long long now_us, unsigned long long last_seen_us) {
    pthread_mutex_lock(&answering);
    struct answer *now = &asked[card].answers[asked[card].count++ % ANSWERS];
    const struct answer *then = answer_at(card, last_seen_us);
    then = then == now || (then && now_us - then->at_us > 1000000) ? NULL : then;
    now->at_us = now_us;
    for (unsigned i = 0; i < count; i++) {
        uint32_t slot = found[i].slot;
        now->generations[slot] = node_state->processes[slot].generation;
        now->busy_ns[slot] = timeline_process_total(card, slot);
        percents[i] = then ? since(then, now_us, slot, now->generations[slot], now->busy_ns[slot])
                           : (unsigned)((timeline_process_busy(card, slot) + 5000000) / 10000000);
    }
    count = add_past(card, then, now, found, percents, count);
    pthread_mutex_unlock(&answering);
    return count;
}

/* One sample for each process that was busy, with the current time. */
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *room, unsigned long long last_seen_us) {
    uint32_t card;
    struct seen found[FENKA_NODE_SLOTS];
    unsigned percents[FENKA_NODE_SLOTS], busy = 0;
    TRY(nvml_card(device, &card));
    if (node_state->mig[card].enabled)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!room)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct timespec clock;
    clock_gettime(CLOCK_REALTIME, &clock);
    uint64_t now_us = (uint64_t)clock.tv_sec * 1000000 + (uint64_t)clock.tv_nsec / 1000;
    unsigned count = collect(card, found);
    if (!samples) { /* a capacity for all processes, because nothing is measured yet */
        *room = count + FENKA_NODE_PAST;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    if (last_seen_us >= now_us) {
        *room = 0;
        return NVML_ERROR_NOT_FOUND;
    }
    TRY(*room >= count ? NVML_SUCCESS : fits(room, count, samples));
    count = measure(card, found, count, percents, now_us, last_seen_us);
    for (unsigned i = 0; i < count; i++)
        if (percents[i] > 0) {
            found[busy] = found[i];
            percents[busy++] = percents[i];
        }
    if (busy == 0) {
        *room = 0;
        return NVML_ERROR_NOT_FOUND;
    }
    busy = busy < *room ? busy : *room;
    *room = busy;
    for (unsigned i = 0; i < busy; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = found[i].pid, .timeStamp = now_us, .smUtil = percents[i], .memUtil = percents[i] / 2};
    return NVML_SUCCESS;
}
