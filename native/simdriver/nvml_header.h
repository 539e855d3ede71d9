/* nvml.h with every version of every name as its own declaration, exported. */
#ifndef FENKA_SIMULATED_NVML_HEADER_H
#define FENKA_SIMULATED_NVML_HEADER_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop
#endif
