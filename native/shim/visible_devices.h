#ifndef FENKA_VISIBLE_H
#define FENKA_VISIBLE_H
#include <stdint.h>

/* Applies CUDA's rules for CUDA_VISIBLE_DEVICES to the cards of the lease. Numbers count within the lease; UUIDs may be
 * shortened while they are unique; the first token that names no card, or one again, ends the list. NULL = all. Returns
 * the number of cards in `chosen` (of size FENKA_MAX_CARDS). */
unsigned visible_cards(const char *wanted, uint8_t *chosen);
#endif
