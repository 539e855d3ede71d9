/* nvidia-smi takes its list of processes, and cards by number, from a private table of NVML's, which no symbol's
 * hook reaches. It is given a copy in which those few functions are ours.
 *
 * What is known of the table NVIDIA published under Apache-2.0 (k8s-test-infra, nvml-mock), for driver 535. Of
 * another driver's table nothing is known, and to guess could crash the program: it passes through as it is, and
 * then nvidia-smi may show other leases' processes. Limits do not hang on it. */
#include <stdlib.h>
#include <string.h>

#include "lease.h"
#include "os.h"
#include "process_list.h"

#define KNOWN_DRIVER "535."
#define HANDLE_BY_INDEX 81
#define PROCESSES 213 /* compute, graphics, MPS */
#define LISTS 3
#define LAST (PROCESSES + LISTS - 1)
#define MAX_WORDS 1024

static const unsigned char smi[] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                    0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

struct listed {
    struct process process;
    uint32_t gpu_instance, compute_instance;
    uint64_t protected_bytes;
    char name[4096];
};
_Static_assert(sizeof(struct listed) == 4128, "nvidia-smi steps through the list in these");

static void *copy[MAX_WORDS];
static process_function real[LISTS];

static nvmlReturn_t handle_by_index(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* Those that the driver knows by another number have no more than that and their bytes. */
static void name_unknown(struct listed *entry) {
    if (entry->name[0] != (char)0xff)
        return;
    memset(entry->name, 0, sizeof entry->name);
    entry->protected_bytes = 0;
    if (!os_executable(entry->process.pid, entry->name, sizeof entry->name))
        strcpy(entry->name, "[Not Found]");
}

/* *count is the room, and what does not fit is left out. */
static nvmlReturn_t list(unsigned which, nvmlDevice_t device, unsigned int *count, struct listed *out) {
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return BROKEN;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct listed *room = calloc(2 * MAX_PROCESSES, sizeof *room);
    struct process_list ours = {(char *)room, (char *)(room + MAX_PROCESSES), sizeof *room, MAX_PROCESSES, 0};
    nvmlReturn_t result = room ? real[which](device, &ours.in_driver, room) : NVML_ERROR_MEMORY;
    if (result == NVML_SUCCESS) {
        if (ours.in_driver > MAX_PROCESSES)
            ours.in_driver = MAX_PROCESSES;
        process_list_filter(&ours, (unsigned)card, which == 0);
        *count = !out ? 0 : ours.count < *count ? ours.count : *count;
        for (unsigned int i = 0; i < *count; i++) {
            out[i] = room[MAX_PROCESSES + i];
            name_unknown(&out[i]);
        }
    }
    free(room);
    return result;
}

static nvmlReturn_t compute(nvmlDevice_t device, unsigned int *count, struct listed *out) {
    return list(0, device, count, out);
}

static nvmlReturn_t graphics(nvmlDevice_t device, unsigned int *count, struct listed *out) {
    return list(1, device, count, out);
}

static nvmlReturn_t mps(nvmlDevice_t device, unsigned int *count, struct listed *out) {
    return list(2, device, count, out);
}

/* The simulated driver has that table under every version. */
static bool is_known(void *const *table) {
    char version[80] = "";
    uint64_t bytes = (uint64_t)(uintptr_t)table[0];
    if (bytes % 8 || bytes <= LAST * 8 || bytes > sizeof copy)
        return false;
    if (HAS(fenka_simulated_nvml))
        return true;
    return REAL_NVML(nvmlSystemGetDriverVersion)(version, sizeof version) == NVML_SUCCESS &&
           !strncmp(version, KNOWN_DRIVER, sizeof KNOWN_DRIVER - 1);
}

/* Two threads that do this at once write the same. */
static const void *filtered(void *const *table) {
    static void *const own[LISTS] = {(void *)compute, (void *)graphics, (void *)mps};
    for (unsigned i = 0; i < LISTS; i++)
        real[i] = (process_function)table[PROCESSES + i];
    for (unsigned i = 0; i < (uintptr_t)table[0] / 8; i++)
        __atomic_store_n(&copy[i],
                         i == HANDLE_BY_INDEX                      ? (void *)handle_by_index
                         : i >= PROCESSES && i < PROCESSES + LISTS ? own[i - PROCESSES]
                                                                   : table[i],
                         __ATOMIC_RELAXED);
    return copy;
}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id) {
    nvmlReturn_t result = REAL_NVML(nvmlInternalGetExportTable)(table, id);
    if (result == NVML_SUCCESS && !memcmp(id, smi, sizeof smi) && *table && is_known((void *const *)*table))
        *table = filtered((void *const *)*table);
    return result;
}
