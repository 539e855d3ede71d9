/* Relaxed atomic access to 64-bit words that threads or processes share. */
#ifndef FENKA_ATOMICS_H
#define FENKA_ATOMICS_H
#include <stdbool.h>
#include <stdint.h>

static inline uint64_t load_relaxed(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

static inline void store_relaxed(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

static inline bool swap_relaxed(uint64_t *word, uint64_t expected, uint64_t next) {
    return __atomic_compare_exchange_n(word, &expected, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#endif
