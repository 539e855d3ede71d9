/* The share of a card's time that the lease may have: who has had more waits. See compute.c. */
#ifndef FENKA_COMPUTE_H
#define FENKA_COMPUTE_H
#include <stdbool.h>
#include <stdint.h>

/* Waits until the lease may have more of the card's time, and takes `cost` ns of it. */
void compute_take(unsigned card, uint64_t cost);

/* What was taken was too little or too much. */
void compute_adjust(unsigned card, int64_t cost);
#endif
