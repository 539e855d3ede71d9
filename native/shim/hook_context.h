/* Contexts: what they cost, and what dies with them. */
#ifndef FENKA_CONTEXT_H
#define FENKA_CONTEXT_H
#include <stdint.h>

#include "resolve.h"

extern uint32_t context_deaths; /* changes whenever a context's address may come to mean another */

uint64_t context_primary(unsigned card); /* 0 = not there, as far as we saw */

/* Code that is loaded into every context of this process, also those to come: all of it, or out of memory. */
CUresult context_load(uint64_t bytes);
void context_unload(uint64_t bytes);

void context_reset(void);               /* in a child after fork */
#endif
