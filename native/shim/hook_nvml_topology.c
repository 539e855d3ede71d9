/* Of the cards that NVML finds by their place in the machine, a program gets those of its lease. */
#include <stdlib.h>

#include "lease.h"
#include "nvml_cards.h"

enum { MAX_FOUND = 1024 }; /* more cards than any machine has */

/* The driver's query, for either function. */
struct query {
    nvmlDevice_t device; /* NULL = by CPU */
    unsigned int place;  /* a level, or a CPU */
};

static nvmlReturn_t ask(struct query query, unsigned int *count, nvmlDevice_t *found) {
    if (query.device)
        return REAL_NVML(nvmlDeviceGetTopologyNearestGpus)(query.device, (nvmlGpuTopologyLevel_t)query.place, count,
                                                           found);
    return REAL_NVML(nvmlSystemGetTopologyGpuSet)(query.place, count, found);
}

static unsigned int keep_leased(nvmlDevice_t *found, unsigned int count) {
    unsigned int kept = 0;
    for (unsigned int i = 0; i < count; i++)
        if (nvml_card(found[i]) >= 0)
            found[kept++] = found[i];
    return kept;
}

/* A count of zero asks for the number; otherwise `out` has room for so many. */
static nvmlReturn_t leased(struct query query, unsigned int *count, nvmlDevice_t *out) {
    unsigned int all = 0;
    if (!lease_ready())
        return NVML_LEASE_BROKEN;
    if (!count || (*count && !out))
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = ask(query, &all, NULL);
    if (result != NVML_SUCCESS || !all || all > MAX_FOUND) {
        *count = 0;
        return result == NVML_SUCCESS && all ? NVML_ERROR_UNKNOWN : result;
    }
    nvmlDevice_t *found = calloc(all, sizeof *found);
    unsigned int room = all;
    result = found ? ask(query, &room, found) : NVML_ERROR_MEMORY;
    if (result == NVML_SUCCESS) {
        unsigned int kept = keep_leased(found, room < all ? room : all);
        for (unsigned int i = 0; i < kept && i < *count; i++)
            out[i] = found[i];
        *count = *count && *count < kept ? *count : kept;
    }
    free(found);
    return result;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned int *count,
                                              nvmlDevice_t *devices) {
    return device ? leased((struct query){device, level}, count, devices) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices) {
    return leased((struct query){NULL, cpu}, count, devices);
}
