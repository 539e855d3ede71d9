#ifndef FENKA_QUERY_H
#define FENKA_QUERY_H
#include <stdint.h>

/* Turns bytes free and in all of a card into those of the slice: never more free than there really is. */
void slice_meminfo(unsigned card, uint64_t *free, uint64_t *total);
#endif
