/* Which processes own the account's slots, and which of them are dead. */
#ifndef FENKA_ACCOUNT_OWNER_H
#define FENKA_ACCOUNT_OWNER_H
#include <stdbool.h>
#include <stdint.h>

/* Sets account_identity. False if /proc does not show this process. */
bool account_identify(void);

/* Requests a look at all processes from the agent, and waits for it. False after a timeout; then no request is made for a
 * while. */
bool account_request_look(void);

/* Whether the owner is of this process's PID namespace, so that its PID means the same here. */
bool account_same_pids(uint64_t identity);

/* True only if the owner is certainly dead. `quick`: by the PID alone, which misses zombies and reused PIDs. */
bool account_owner_dead(uint64_t identity, bool quick);
#endif
