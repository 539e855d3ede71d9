/* Device memory: charged to this process's slot; the sum of all slots is limited. */
#ifndef FENKA_SIMULATED_ACCOUNT_H
#define FENKA_SIMULATED_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

/* As on cards from Pascal on: small allocations share pages, at multiples of 512 bytes; a larger one has pages of its own.
 * What a small one leaves of its page serves others, so only the granule is charged. */
#define CARD_GRANULE 512u
#define CARD_PAGE (2u << 20)
#define CARD_SHARES_PAGES (1u << 20) /* up to this size */
/* More than any card has stays so. */
uint64_t rounded_up(uint64_t bytes, uint64_t unit);
/* What an allocation of so many bytes takes of a card. */
uint64_t sim_memory_taken(uint64_t bytes);

/* False, and nothing is charged, if the card's memory would be exceeded. */
bool sim_memory_charge(uint32_t card, uint64_t bytes);
void sim_memory_release(uint32_t card, uint64_t bytes);
uint64_t sim_memory_total(uint32_t card);
/* Of an instance of a card, by the mark that its processes have; 0 = of the whole card. Without what the driver
 * reserves. */
uint64_t sim_memory_size(uint32_t card, uint32_t mark);
uint64_t sim_memory_used(uint32_t card, uint32_t mark);
/* The mark of this process. */
uint32_t sim_memory_mark(uint32_t card);
#endif
