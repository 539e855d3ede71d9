/* The driver's path outside of a lease: the same text that this library names as DT_AUXILIARY (see the Makefile), for
 * the proxy to read. `fenka proxy install` overwrites both. */
#include "proxy.h"

PROXY_EXPORT extern const char PLACED[];

const char PLACED[] = ROOM;
