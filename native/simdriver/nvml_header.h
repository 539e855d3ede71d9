/* nvml.h with every version of every name as its own declaration, exported. */
#ifndef FENKA_SIMULATED_NVML_HEADER_H
#define FENKA_SIMULATED_NVML_HEADER_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
/* In no header, but exported by all of NVIDIA's libraries. */
nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);
/* In this one alone. */
void fenka_simulated_nvml(void);
#pragma GCC visibility pop
#endif
