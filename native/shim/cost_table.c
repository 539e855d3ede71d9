#include "cost_table.h"

#include <string.h>

#include "atomics.h"

#define ENTRIES 4096 /* a power of two */
#define PROBES 8
#define SAMPLE_UNIT_NS 100

static struct cost_entry table[ENTRIES];

void cost_table_reset(void) { memset(table, 0, sizeof table); }

/* When all probed entries are taken, the first one is reused. */
struct cost_entry *cost_table_entry(uint64_t key) {
    uint64_t home = key >> 20;
    for (unsigned probe = 0; probe <= PROBES; probe++) {
        struct cost_entry *entry = &table[(home + probe % PROBES) & (ENTRIES - 1)];
        uint64_t seen = load_relaxed(&entry->key);
        if (seen == key)
            return entry;
        if (seen && probe < PROBES)
            continue;
        store_relaxed(&entry->cost, COST_UNKNOWN);
        store_relaxed(&entry->first_started_at, 0);
        entry->samples = 0;
        if (__atomic_compare_exchange_n(&entry->key, &seen, key, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED) ||
            seen == key)
            return entry;
    }
    return &table[home & (ENTRIES - 1)];
}

bool cost_table_add(struct cost_entry *entry, uint64_t key, uint64_t ns) {
    if (load_relaxed(&entry->key) != key)
        return false;
    uint32_t samples = __atomic_fetch_add(&entry->samples, 1, __ATOMIC_RELAXED), least = UINT32_MAX;
    uint64_t units = ns / SAMPLE_UNIT_NS;
    __atomic_store_n(&entry->recent[samples % COST_RECENT], units < UINT32_MAX ? (uint32_t)units : UINT32_MAX,
                     __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < COST_RECENT && i <= samples; i++) {
        uint32_t sample = __atomic_load_n(&entry->recent[i], __ATOMIC_RELAXED);
        least = sample < least ? sample : least;
    }
    store_relaxed(&entry->cost, (uint64_t)least * SAMPLE_UNIT_NS);
    return true;
}

void cost_table_invalidate(uint64_t key) {
    struct cost_entry *entry = cost_table_entry(key);
    store_relaxed(&entry->cost, COST_UNKNOWN);
    entry->samples = 0;
}
