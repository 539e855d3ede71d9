/* Device memory held: charged to this process's slot, judged against the sum of all slots. */
#ifndef FENKA_SIMULATED_ACCOUNT_H
#define FENKA_SIMULATED_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

/* False, and nothing charged, where the card would be exceeded. */
bool account_charge(uint32_t card, uint64_t bytes);
void account_release(uint32_t card, uint64_t bytes);
uint64_t account_total(uint32_t card);
#endif
