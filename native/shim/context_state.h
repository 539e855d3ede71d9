/* What other files need to know of contexts. hook_context.c updates it. */
#ifndef FENKA_CONTEXT_STATE_H
#define FENKA_CONTEXT_STATE_H
#include <stdint.h>

extern uint32_t context_deaths; /* changes whenever a context's address may come to name another */

/* Each card's primary context; 0 = none that the shim has seen. */
uint64_t context_primary(unsigned card);
uint64_t context_set_primary(unsigned card, uint64_t context); /* returns the one before */

void context_state_reset(void); /* in a child after fork */
#endif
