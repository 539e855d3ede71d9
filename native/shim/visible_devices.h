#ifndef FENKA_VISIBLE_H
#define FENKA_VISIBLE_H
#include <stdint.h>

/* Applies CUDA's rules for CUDA_VISIBLE_DEVICES to the cards of the lease. Numbers count within the lease, and are read
 * like strtoul: `+1` and `1gpu` are 1. UUIDs may be shortened while they are unique. The first token that names no card
 * ends the list; a repeated card empties it (torch/cuda/__init__.py, _parse_visible_devices). NULL = all. Returns the
 * number of cards in `chosen` (of size FENKA_MAX_CARDS). */
unsigned visible_cards(const char *wanted, uint8_t *chosen);
#endif
