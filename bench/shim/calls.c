/* Times calls of the driver: one line "NAME NANOSECONDS" for each, the least of several rounds.
 *
 * With "hold": takes some memory, says so, and holds it until its input ends. With "attach": says that it
 * is ready, and times its first call once its input ends. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static void launch_on_stream(void) {
    cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, (CUstream)0x100, NULL, NULL);
}

static void memory_info(void) {
    size_t free, total;
    cuMemGetInfo_v2(&free, &total);
}

static void get_proc_address(void) {
    void *f;
    cuGetProcAddress_v2("cuMemFree", &f, 12000, 0, NULL);
}

#define LAUNCHES 2000000

static void *launches(void *took) {
    double begin = now();
    for (long i = 0; i < LAUNCHES; i++)
        launch();
    *(double *)took = (now() - begin) / LAUNCHES;
    return NULL;
}

static void in_threads(const char *name, bool two) {
    double took[2] = {0}, best = 1e18;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t other;
        if (two)
    
        pthread_create(&other, NULL, launches, &took[0]);
        launches(&took[1]);
        if (two)
            pthread_join(other, NULL);
        double slower = took[0] > took[1] ? took[0] : took[1];
        best = slower < best ? slower : best;
    }
    printf("%s %.2f\n", name, best);
}

static int hold(void) {
    CUcontext context;
    CUdeviceptr p;
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuMemAlloc_v2(&p, 1 << 20))
        return 1;
    puts("held");
    fflush(stdout);
    return getchar() == EOF ? 0 : 1;
}

static int attach(void) {
    puts("ready");
    fflush(stdout);
    getchar();
    double begin = now();
    int failed = cuInit(0);
    printf("attach %.0f\n", now() - begin);
    return failed;
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

int main(int argc, char **argv) {
    CUcontext context;
    if (argc > 1)
        return strcmp(argv[1], "hold") ? attach() : hold();
    double begin = now();
    if (cuInit(0))
        return 1;
    printf("cuInit %.0f\n", now() - begin);
    begin = now();
    cuCtxCreate_v2(&context, 0, 0);
    printf("cuCtxCreate %.0f\n", now() - begin);
    measure("cuMemAlloc+cuMemFree", alloc_free, 300000);
    measure("cuLaunchKernel", launch, 1000000);
    measure("cuLaunchKernel,stream", launch_on_stream, 1000000);
    in_threads("cuLaunchKernel,one-thread", false);
    in_threads("cuLaunchKernel,two-threads", true);
    measure("cuMemGetInfo", memory_info, 100000);
    measure("cuGetProcAddress", get_proc_address, 30000);
    return 0;
}
