/* What an allocation takes of a card: more than a program requests.
 *
 * Drivers place small allocations in pages that they share, at multiples of 512 bytes. A larger one has pages of its
 * own, of 2 MiB. cuda.h does not state this; cuMemGetInfo shows it on cards from Pascal on, and allocators such as
 * PyTorch's are written for it. */
#ifndef FENKA_CARD_BYTES_H
#define FENKA_CARD_BYTES_H
#include <stdint.h>

#define CARD_GRANULE ((uint64_t)512)
#define CARD_PAGE ((uint64_t)2 << 20)
#define CARD_SHARES_PAGES ((uint64_t)1 << 20) /* up to this size */

/* More than any card has stays so: the sum saturates. */
static inline uint64_t rounded_up(uint64_t bytes, uint64_t unit) {
    return bytes > UINT64_MAX - unit ? UINT64_MAX : (bytes + unit - 1) & ~(unit - 1);
}

static inline uint64_t card_bytes(uint64_t bytes) {
    return rounded_up(bytes, bytes > CARD_SHARES_PAGES ? CARD_PAGE : CARD_GRANULE);
}

/* A graph's nodes take pages of 64 KiB from a pool of their own. */
static inline uint64_t card_bytes_of_node(uint64_t bytes) { return rounded_up(bytes, (uint64_t)64 << 10); }
#endif
