/* Measured costs of launches, by what is launched, in a table of the process.
 *
 * A measured interval is too long if other programs or streams had the card meanwhile, so the least of the last few
 * counts. The table is not locked: its words are atomic, and of two threads that claim one entry at once one loses its
 * measurement. */
#ifndef FENKA_COST_TABLE_H
#define FENKA_COST_TABLE_H
#include <stdbool.h>
#include <stdint.h>

#define COST_UNKNOWN UINT64_MAX
#define COST_RECENT 8

struct cost_entry {
    uint64_t key;              /* 0 = free */
    uint64_t cost;             /* ns, or COST_UNKNOWN */
    uint64_t first_started_at; /* start of the first measurement; 0 = none in progress */
    uint32_t samples;
    uint32_t recent[COST_RECENT]; /* in units of 100 ns */
};

struct cost_entry *cost_table_entry(uint64_t key);

/* Adds a measurement, unless another key has taken the entry. False in that case. */
bool cost_table_add(struct cost_entry *entry, uint64_t key, uint64_t ns);

/* The work with this key will cost something else from now on. */
void cost_table_invalidate(uint64_t key);

void cost_table_reset(void); /* in a child after fork */
#endif
