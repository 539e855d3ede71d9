/* nvidia-smi reads its list of processes, and cards by index, through a private table of NVML, which hooks of symbols
 * do not reach. It gets a copy in which those functions are replaced.
 *
 * The layout for driver 535 was published by NVIDIA under Apache-2.0 (k8s-test-infra, nvml-mock). Other drivers' tables
 * are unknown, and a wrong guess could crash the program, so they are passed through unchanged. Then nvidia-smi may
 * show other leases' processes; limits are not affected. */
#include <stdlib.h>
#include <string.h>

#include "lease.h"
#include "nvml_cards.h"
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
_Static_assert(sizeof(struct listed) == 4128, "the stride of nvidia-smi's list");

static void *copy[MAX_WORDS];
static process_function real[LISTS];

static nvmlReturn_t handle_by_index(unsigned int index, nvmlDevice_t *device) {
    return nvml_handle_by_index(index, device);
}

/* An entry that the driver does not list has only a PID and its bytes. */
static void fill_name(struct listed *entry) {
    if (entry->name[0] != (char)0xff)
        return;
    memset(entry->name, 0, sizeof entry->name);
    entry->protected_bytes = 0;
    if (!os_executable(entry->process.pid, entry->name, sizeof entry->name))
        strcpy(entry->name, "[Not Found]");
}

/* *count: in, the capacity of `out`; entries beyond it are dropped. */
static nvmlReturn_t list(unsigned which, nvmlDevice_t device, unsigned int *count, struct listed *out) {
    int card = lease_ready() ? nvml_card(device) : -1;
    if (card < 0)
        return NVML_LEASE_BROKEN;
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
            fill_name(&out[i]);
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

/* Threads that do this at the same time write the same values. */
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
