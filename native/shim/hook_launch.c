/* Every way to give a card work: the same around each. cuLaunchHostFunc is not among them: it is the host's. */
#include "control.h"
#include "launch_cost.h"

/* Names work by what runs and how large it is: other sizes of the same function cost something else. */
static inline uint64_t named(const void *function, uint64_t a, uint64_t b) {
    uint64_t mixed = (uint64_t)function * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ a) * 0xff51afd7ed558ccdu;
    mixed = (mixed ^ mixed >> 32 ^ b) * 0xc4ceb9fe1a85ec53u;
    return (mixed ^ mixed >> 29) | 1;
}

#define SIZES(x, y, z, bx, by, bz) \
    (uint64_t)(x) << 32 | (uint32_t)(y), (uint64_t)(z) << 32 ^ (uint64_t)(bx) << 20 ^ (uint64_t)(by) << 10 ^ (bz)

/* A stream argument of 0 means the thread's own stream to the functions of per-thread streams. */
#define OWN(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

#define LAUNCH(work, stream, call)                                \
    do {                                                         \
        struct launch launch_;                                   \
        if (__builtin_expect(!control_limits_compute(), 1))      \
            return call;                                         \
        launch_begin(&launch_, work, stream);                   \
        return launch_end(&launch_, call, stream);              \
    } while (0)

#define SHAPE                                                                                                       \
    unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,           \
        unsigned int shared
#define SHAPED gx, gy, gz, bx, by, bz, shared
#define WORK named(f, SIZES(gx, gy, gz, bx, by, bz))

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

#define CONFIGURED(c) \
    named(f, SIZES((c)->gridDimX, (c)->gridDimY, (c)->gridDimZ, (c)->blockDimX, (c)->blockDimY, (c)->blockDimZ))

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    if (!c)
        return REAL(cuLaunchKernelEx)(c, f, parameters, extra);
    LAUNCH(CONFIGURED(c), c->hStream, REAL(cuLaunchKernelEx)(c, f, parameters, extra));
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    if (!c)
        return REAL(cuLaunchKernelEx_ptsz)(c, f, parameters, extra);
    LAUNCH(CONFIGURED(c), OWN(c->hStream), REAL(cuLaunchKernelEx_ptsz)(c, f, parameters, extra));
}

/* The block's shape was set before, and is not known here. */
CUresult cuLaunch(CUfunction f) {
    LAUNCH(named(f, 1, 1), NULL, REAL(cuLaunch)(f));
}

CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    LAUNCH(named(f, (uint64_t)width, (uint64_t)height), NULL, REAL(cuLaunchGrid)(f, width, height));
}

CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    LAUNCH(named(f, (uint64_t)width, (uint64_t)height), stream, REAL(cuLaunchGridAsync)(f, width, height, stream));
}

#define MOST 64 /* devices of one cooperative launch; on more it is refused */

/* One kernel on each of several devices, each on a stream of its own: all of them have their turn before any runs. */
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    struct launch launches[MOST];
    if (!control_limits_compute() || !list || !count)
        return REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    if (count > MOST)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        launch_begin(&launches[i],
                      named(p->function, SIZES(p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY,
                                               p->blockDimZ)),
                      p->hStream);
    }
    CUresult result = REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    for (unsigned i = 0; i < count; i++)
        launch_end(&launches[i], result, list[i].hStream);
    return result;
}

/* A whole graph costs what it took the last times. */
uint64_t launch_cost_graph_key(CUgraphExec exec) {
    return named(exec, 0, 0);
}
