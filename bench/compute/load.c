/* Gives the first card work: `load MICROSECONDS[,MICROSECONDS…] [threads] [graph]`, kernels of these lengths in
 * turn, synchronised after each 20 ms of them, until its input ends. Says "ready" once it can launch. Then a line
 * on its input makes it work; a further line makes it pause. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 16
#define TOGETHER_US 20000

static CUcontext context;
static CUfunction kernels[MOST];
static unsigned long lengths[MOST];
static unsigned count;
static volatile bool working, ended;

static void must(CUresult result, const char *what) {
    if (result) {
        fprintf(stderr, "load: %s: %d\n", what, result);
        exit(1);
    }
}

static void *work(void *graph) {
    CUstream stream;
    CUgraphExec exec = NULL;
    must(cuCtxSetCurrent(context), "set current");
    must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "stream");
    if (graph) {
        CUgraph made;
        must(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
        for (unsigned i = 0; i < count; i++)
            must(cuLaunchKernel(kernels[i], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "captured launch");
        must(cuStreamEndCapture(stream, &made), "end of capture");
        must(cuGraphInstantiateWithFlags(&exec, made, 0), "instantiate");
    }
    for (unsigned at = 0; !ended;) {
        if (!working) {
            usleep(1000);
            continue;
        }
        for (unsigned long given = 0; given < TOGETHER_US && working;) {
            if (exec) {
                must(cuGraphLaunch(exec, stream), "graph launch");
                for (unsigned i = 0; i < count; i++)
                    given += lengths[i];
                continue;
            }
            must(cuLaunchKernel(kernels[at], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "launch");
            given += lengths[at];
            at = (at + 1) % count;
        }
        must(cuStreamSynchronize(stream), "synchronize");
    }
    return NULL;
}

int main(int argc, char **argv) {
    CUmodule module;
    char name[64];
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    bool graph = argc > 3 && !strcmp(argv[3], "graph");
    must(cuInit(0), "init");
    must(cuCtxCreate_v2(&context, 0, 0), "context");
    must(cuModuleLoadData(&module, "named by its kernels"), "module");
    for (char *one = strtok(argv[1], ","); one && count < MOST; one = strtok(NULL, ",")) {
        lengths[count] = strtoul(one, NULL, 10);
        snprintf(name, sizeof name, "k_us%lu", lengths[count]);
        must(cuModuleGetFunction(&kernels[count++], module, name), name);
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
