/* Where the driver is when no lease has it: the same text that this library names as DT_AUXILIARY (see the Makefile),
 * for the proxy to read. `fenka proxy install` writes over both. */
#include "proxy.h"

PROXY_EXPORT extern const char PLACED[];

const char PLACED[] = ROOM;
