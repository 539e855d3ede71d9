/* Eight threads that allocate, copy, launch and free at once, until the time given (ms) is over.
 * Prints the rounds made and the free memory before and after; exits with the first wrong code. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef unsigned long long pointer;
extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(pointer *, size_t), cuMemFree_v2(pointer), cuMemGetInfo_v2(size_t *, size_t *);
extern int cuMemcpyHtoD_v2(pointer, const void *, size_t), cuMemcpyDtoH_v2(void *, pointer, size_t);
extern int cuModuleLoadData(void **, const void *), cuModuleGetFunction(void **, void *, const char *);
extern int cuStreamCreate(void **, unsigned), cuStreamDestroy_v2(void *), cuStreamSynchronize(void *);
extern int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          void *, void **, void **);

#define THREADS 8
#define MUST(call)                                                                                 \
    do {                                                                                           \
        int code_ = (call);                                                                        \
        if (code_ != 0) {                                                                          \
            fprintf(stderr, "%s: %d\n", #call, code_);                                             \
            exit(code_ % 256 ? code_ % 256 : 1);                                                   \
        }                                                                                          \
    } while (0)

static void *context, *module;
static double end_s;
static unsigned long rounds;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *work(void *number)
{
    unsigned id = (unsigned)(size_t)number, made = 0;
    MUST(cuCtxSetCurrent(context));
    while (now_s() < end_s) {
        void *stream, *function;
        pointer small, big;
        unsigned sent = id << 16 | made, got = 0;
        MUST(cuStreamCreate(&stream, 0));
        MUST(cuModuleGetFunction(&function, module, "k_us1"));
        MUST(cuMemAlloc_v2(&small, 4));
        MUST(cuMemAlloc_v2(&big, 1 << 20));
        MUST(cuMemcpyHtoD_v2(small, &sent, 4));
        MUST(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        MUST(cuMemcpyDtoH_v2(&got, small, 4));
        MUST(got != sent);
        MUST(cuStreamSynchronize(stream));
        MUST(cuMemFree_v2(big));
        MUST(cuMemFree_v2(small));
        MUST(cuStreamDestroy_v2(stream));
        made++;
    }
    __atomic_fetch_add(&rounds, made, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv)
{
    size_t before, after, total;
    pthread_t threads[THREADS];
    MUST(argc != 2);
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    MUST(cuModuleLoadData(&module, "an image"));
    MUST(cuMemGetInfo_v2(&before, &total));
    end_s = now_s() + atof(argv[1]) / 1000;
    for (size_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], NULL, work, (void *)i));
    for (size_t i = 0; i < THREADS; i++)
        MUST(pthread_join(threads[i], NULL));
    MUST(cuMemGetInfo_v2(&after, &total));
    printf("%lu %zu %zu\n", rounds, before, after);
    return 0;
}
