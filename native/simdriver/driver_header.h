/* cuda.h and cudaProfiler.h with every version of every name as its own declaration, exported. */
#ifndef FENKA_SIMULATED_DRIVER_HEADER_H
#define FENKA_SIMULATED_DRIVER_HEADER_H
#define __CUDA_API_VERSION_INTERNAL
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cudaProfiler.h>
#pragma GCC visibility pop
#endif
