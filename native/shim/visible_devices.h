#ifndef FENKA_VISIBLE_H
#define FENKA_VISIBLE_H
#include <stdint.h>

/* CUDA's own rule for CUDA_VISIBLE_DEVICES, applied to the cards of the lease: numbers count within it, UUIDs
 * may be shortened while they name one card, and the first token that names none, or one again, ends the
 * list. NULL = all. Returns how many cards there are in `chosen` (room for FENKA_MAX_CARDS). */
unsigned visible_cards(const char *wanted, uint8_t *chosen);
#endif
