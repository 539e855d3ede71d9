/* Launches that do nothing, and events that say how long they took: FENKA_NULL_KERNEL_US each. Like a real driver
 * it forbids events while a stream is captured; here that ends the program, so that no test misses it. */
#define DOES_NOTHING(name, ...) \
    CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared

DOES_NOTHING(cuLaunch, CUfunction f)
DOES_NOTHING(cuLaunchGrid, CUfunction f, int w, int h)
DOES_NOTHING(cuLaunchGridAsync, CUfunction f, int w, int h, CUstream s)
DOES_NOTHING(cuLaunchKernel, CUfunction f, SHAPE, CUstream s, void **p, void **e)
DOES_NOTHING(cuLaunchKernel_ptsz, CUfunction f, SHAPE, CUstream s, void **p, void **e)
DOES_NOTHING(cuLaunchKernelEx, const CUlaunchConfig *c, CUfunction f, void **p, void **e)
DOES_NOTHING(cuLaunchKernelEx_ptsz, const CUlaunchConfig *c, CUfunction f, void **p, void **e)
DOES_NOTHING(cuLaunchCooperativeKernel, CUfunction f, SHAPE, CUstream s, void **p)
DOES_NOTHING(cuLaunchCooperativeKernel_ptsz, CUfunction f, SHAPE, CUstream s, void **p)
DOES_NOTHING(cuLaunchCooperativeKernelMultiDevice, CUDA_LAUNCH_PARAMS *l, unsigned n, unsigned flags)

static __thread CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = captured && stream ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static void forbidden_while_capturing(void) {
    if (captured && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        abort();
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    forbidden_while_capturing();
    *event = (CUevent)0x40;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    if (captured && stream)
        abort();
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventQuery(CUevent event) {
    forbidden_while_capturing();
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
    const char *us = getenv("FENKA_NULL_KERNEL_US");
    (void)begin, (void)end;
    *milliseconds = us ? (float)atof(us) / 1000 : 0;
    return CUDA_SUCCESS;
}
