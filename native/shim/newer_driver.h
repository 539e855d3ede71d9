/* cuda.h with every version of every function, and functions that it lacks: those of headers that need OpenGL's or
 * VDPAU's, and of newer drivers (none today). Their signatures are NVIDIA's. */
#ifndef FENKA_NEWER_DRIVER_H
#define FENKA_NEWER_DRIVER_H
#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#pragma GCC visibility push(default)
#include <cuda.h>

CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device);
CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
/* A VdpDevice has 32 bits. */
CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get);
CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, unsigned int display, void *get);
#pragma GCC visibility pop
#endif
