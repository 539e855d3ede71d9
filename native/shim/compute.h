/* The share of a card's time that the lease may have: who has had more waits. See compute.c. */
#ifndef FENKA_COMPUTE_H
#define FENKA_COMPUTE_H
#include <stdbool.h>
#include <stdint.h>

/* Waits until the lease may have more of the card's time, and takes `cost` ns of it. */
void throttle_wait(unsigned card, uint64_t cost);

/* What a launch is charged beforehand that was never measured: were it charged afterwards only, a program that is
 * killed before its first launch has ended would have had it for nothing. It doubles with each launch until it is
 * known what that one cost; NULL where it will not be known. Either way the program takes and adjusts it. */
uint64_t compute_precharge(unsigned card);
void compute_precharge_end(unsigned card, const uint64_t *ns);

/* What was taken was too little or too much. */
void compute_adjust(unsigned card, int64_t cost);
#endif
