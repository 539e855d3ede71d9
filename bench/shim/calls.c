/* Times calls of the driver: one line "NAME NANOSECONDS" for each, the least of several rounds. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 9

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void alloc_free(void) {
    CUdeviceptr p;
    if (cuMemAlloc_v2(&p, 4096) || cuMemFree_v2(p))
        abort();
}

static void launch(void) {
    cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void memory_info(void) {
    size_t free, total;
    cuMemGetInfo_v2(&free, &total);
}

static void get_proc_address(void) {
    void *f;
    cuGetProcAddress_v2("cuMemFree", &f, 12000, 0, NULL);
}

static void measure(const char *name, void (*call)(void), long n) {
    double best = 1e18;
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now();
        for (long i = 0; i < n; i++)
            call();
        double each = (now() - begin) / (double)n;
        best = each < best ? each : best;
    }
    printf("%s %.2f\n", name, best);
}

int main(void) {
    CUcontext context;
    double begin = now();
    if (cuInit(0))
        return 1;
    printf("cuInit %.0f\n", now() - begin);
    begin = now();
    cuCtxCreate_v2(&context, 0, 0);
    printf("cuCtxCreate %.0f\n", now() - begin);
    measure("cuMemAlloc+cuMemFree", alloc_free, 300000);
    measure("cuLaunchKernel", launch, 1000000);
    measure("cuMemGetInfo", memory_info, 100000);
    measure("cuGetProcAddress", get_proc_address, 30000);
    return 0;
}
