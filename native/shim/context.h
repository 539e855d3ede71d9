/* Contexts: what they cost, and what dies with them. */
#ifndef FENKA_CONTEXT_H
#define FENKA_CONTEXT_H
#include <stdint.h>

extern uint32_t context_deaths; /* changes whenever a context's address may come to mean another */

uint64_t context_primary(unsigned card); /* 0 = not there, as far as we saw */
void context_forget(void);               /* in a child after fork */
#endif
