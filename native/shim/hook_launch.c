/* Launches of kernels. cuLaunchHostFunc is not among them, because it runs on the host. */
#include "control.h"
#include "launch_cost.h"

#define SIZES(x, y, z, bx, by, bz) \
    (uint64_t)(x) << 32 | (uint32_t)(y), (uint64_t)(z) << 32 ^ (uint64_t)(bx) << 20 ^ (uint64_t)(by) << 10 ^ (bz)

#define SIZES_OF(p) SIZES((p)->gridDimX, (p)->gridDimY, (p)->gridDimZ, (p)->blockDimX, (p)->blockDimY, (p)->blockDimZ)

/* In the per-thread variants, stream 0 is the thread's own stream. */
#define OWN(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

#define LAUNCH(work, stream, call)                          \
    do {                                                    \
        struct launch launch_;                              \
        if (__builtin_expect(!control_limits_compute(), 1)) \
            return call;                                    \
        launch_begin(&launch_, work, stream);               \
        return launch_end(&launch_, call, stream);          \
    } while (0)

#define SHAPE                                                                                             \
    unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, \
        unsigned int shared
#define SHAPED gx, gy, gz, bx, by, bz, shared
#define WORK launch_cost_key(f, SIZES(gx, gy, gz, bx, by, bz))

CUresult cuLaunchKernel(CUfunction f, SHAPE, CUstream stream, void **parameters, void **extra) {
    LAUNCH(WORK, stream, REAL(cuLaunchKernel)(f, SHAPED, stream, parameters, extra));
}

CUresult cuLaunchKernel_ptsz(CUfunction f, SHAPE, CUstream stream, void **parameters, void **extra) {
    LAUNCH(WORK, OWN(stream), REAL(cuLaunchKernel_ptsz)(f, SHAPED, stream, parameters, extra));
}

CUresult cuLaunchCooperativeKernel(CUfunction f, SHAPE, CUstream stream, void **parameters) {
    LAUNCH(WORK, stream, REAL(cuLaunchCooperativeKernel)(f, SHAPED, stream, parameters));
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, SHAPE, CUstream stream, void **parameters) {
    LAUNCH(WORK, OWN(stream), REAL(cuLaunchCooperativeKernel_ptsz)(f, SHAPED, stream, parameters));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    if (!c)
        return REAL(cuLaunchKernelEx)(c, f, parameters, extra);
    LAUNCH(launch_cost_key(f, SIZES_OF(c)), c->hStream, REAL(cuLaunchKernelEx)(c, f, parameters, extra));
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    if (!c)
        return REAL(cuLaunchKernelEx_ptsz)(c, f, parameters, extra);
    LAUNCH(launch_cost_key(f, SIZES_OF(c)), OWN(c->hStream), REAL(cuLaunchKernelEx_ptsz)(c, f, parameters, extra));
}

/* These functions take the block's shape from earlier calls, so it is not part of the key. */
CUresult cuLaunch(CUfunction f) { LAUNCH(launch_cost_key(f, 1, 1), NULL, REAL(cuLaunch)(f)); }

CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    LAUNCH(launch_cost_key(f, (uint64_t)width, (uint64_t)height), NULL, REAL(cuLaunchGrid)(f, width, height));
}

CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    LAUNCH(launch_cost_key(f, (uint64_t)width, (uint64_t)height), stream,
           REAL(cuLaunchGridAsync)(f, width, height, stream));
}

#define MAX_DEVICES 64 /* of one cooperative launch */

/* One kernel on each of several devices: all of them pass the throttle before any is launched. */
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    struct launch launches[MAX_DEVICES];
    if (!control_limits_compute() || !list || !count)
        return REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    if (count > MAX_DEVICES)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        launch_begin(&launches[i], launch_cost_key(p->function, SIZES_OF(p)), p->hStream);
    }
    CUresult result = REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    for (unsigned i = 0; i < count; i++)
        launch_end(&launches[i], result, list[i].hStream);
    return result;
}
