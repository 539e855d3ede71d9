/* Runs kernels on the first card: `load MICROSECONDS[,MICROSECONDS…] [threads] [graph]`. It launches kernels of these
 * lengths in turn and synchronises after each 20 ms of them, until its input ends. It prints "ready" when it can
 * launch. Each line of input starts or pauses the work. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_KERNELS 16
#define BATCH_US 20000

static CUcontext context;
static CUfunction kernels[MAX_KERNELS];
static unsigned long lengths[MAX_KERNELS];
static unsigned count;
static volatile bool working, ended;

static void check(CUresult result, const char *call) {
    if (result) {
        fprintf(stderr, "load: %s: %d\n", call, result);
        exit(1);
    }
}

static void *work(void *graph) {
    CUstream stream;
    CUgraphExec exec = NULL;
    check(cuCtxSetCurrent(context), "set current");
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "stream");
    if (graph) {
        CUgraph captured;
        check(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
        for (unsigned i = 0; i < count; i++)
            check(cuLaunchKernel(kernels[i], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "captured launch");
        check(cuStreamEndCapture(stream, &captured), "end of capture");
        check(cuGraphInstantiateWithFlags(&exec, captured, 0), "instantiate");
    }
    for (unsigned next = 0; !ended;) {
        if (!working) {
            usleep(1000);
            continue;
        }
        for (unsigned long launched_us = 0; launched_us < BATCH_US && working;) {
            if (exec) {
                check(cuGraphLaunch(exec, stream), "graph launch");
                for (unsigned i = 0; i < count; i++)
                    launched_us += lengths[i];
                continue;
            }
            check(cuLaunchKernel(kernels[next], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "launch");
            launched_us += lengths[next];
            next = (next + 1) % count;
        }
        check(cuStreamSynchronize(stream), "synchronize");
    }
    return NULL;
}

int main(int argc, char **argv) {
    CUmodule module;
    char name[64];
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    bool graph = argc > 3 && !strcmp(argv[3], "graph");
    check(cuInit(0), "init");
    check(cuCtxCreate_v2(&context, 0, 0), "context");
    check(cuModuleLoadData(&module, "named by its kernels"), "module");
    for (char *length = strtok(argv[1], ","); length && count < MAX_KERNELS; length = strtok(NULL, ",")) {
        lengths[count] = strtoul(length, NULL, 10);
        snprintf(name, sizeof name, "k_us%lu", lengths[count]);
        check(cuModuleGetFunction(&kernels[count++], module, name), name);
    }
    for (int i = 0; i < threads; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, work, graph ? &graph : NULL);
    }
    puts("ready");
    fflush(stdout);
    for (char byte; read(0, &byte, 1) == 1;)
        if (byte == '\n')
            working = !working;
    ended = true;
    return 0;
}
