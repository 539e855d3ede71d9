/* A client of the driver that does what it is told, one command a line, one answer a line.
 *
 * STYLE says how it comes by the driver's functions: 0 linked, 1 dlsym, 2 dlvsym, 3 cuGetProcAddress,
 * 4 cuGetProcAddress_v2, 5 the same with per-thread streams. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NEEDED(X)                                                                                     \
    X(cuInit, "cuInit")                                                                               \
    X(cuDeviceGetCount, "cuDeviceGetCount")                                                           \
    X(cuDeviceTotalMem_v2, "cuDeviceTotalMem")                                                        \
    X(cuCtxCreate_v2, "cuCtxCreate")                                                                  \
    X(cuCtxDestroy_v2, "cuCtxDestroy")                                                                \
    X(cuCtxSetCurrent, "cuCtxSetCurrent")                                                             \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")                                           \
    X(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease")                                      \
    X(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset")                                          \
    X(cuMemGetInfo_v2, "cuMemGetInfo")                                                                \
    X(cuMemAlloc_v2, "cuMemAlloc")                                                                    \
    X(cuMemAllocManaged, "cuMemAllocManaged")                                                         \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch")                                                          \
    X(cuMemFree_v2, "cuMemFree")                                                                      \
    X(cuMemAllocAsync, "cuMemAllocAsync")                                                             \
    X(cuMemFreeAsync, "cuMemFreeAsync")                                                               \
    X(cuMemPoolCreate, "cuMemPoolCreate")                                                             \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync")                                             \
    X(cuMemCreate, "cuMemCreate")                                                                     \
    X(cuMemRelease, "cuMemRelease")                                                                   \
    X(cuMemMap, "cuMemMap")                                                                           \
    X(cuMemUnmap, "cuMemUnmap")                                                                       \
    X(cuArray3DCreate_v2, "cuArray3DCreate")                                                          \
    X(cuArrayDestroy, "cuArrayDestroy")                                                               \
    X(cuMipmappedArrayCreate, "cuMipmappedArrayCreate")                                               \
    X(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy")                                             \
    X(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode")

#define DECLARE(name, base) static __typeof__(&name) p_##name;
NEEDED(DECLARE)

static void *find(void *library, const char *name, const char *base) {
#if STYLE == 0
    (void)library, (void)name, (void)base;
    return NULL;
#elif STYLE == 1
    (void)base;
    return dlsym(library, name);
#elif STYLE == 2
    (void)base;
    return dlvsym(library, name, "DRIVER_1");
#else
    (void)name;
    void *function = NULL;
    int version = strcmp(base, "cuCtxCreate") ? 12090 : 4000; /* newer ones have other arguments */
    CUdriverProcAddressQueryResult status;
    if (STYLE == 3) {
        __typeof__(&cuGetProcAddress) get = dlsym(library, "cuGetProcAddress");
        get(base, &function, version, 0);
        return function;
    }
    /* As a runtime does: ask the function for itself, and go on with what it gave. */
    __typeof__(&cuGetProcAddress_v2) get = dlsym(library, "cuGetProcAddress_v2");
    get("cuGetProcAddress", (void **)&get, 12000, 0, &status);
    get(base, &function, version, STYLE == 5 ? 2 : 0, &status);
    return function;
#endif
}

static void load(void) {
    void *library = STYLE ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
#if STYLE == 0
#define LOAD(name, base) p_##name = &name;
#else
#define LOAD(name, base) p_##name = (__typeof__(&name))find(library, #name, base);
#endif
    NEEDED(LOAD)
    (void)find;
    (void)library;
}

static CUmemLocation at(long long device) {
    return (CUmemLocation){.type = device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
                           .id = device < 0 ? 0 : (int)device};
}

/* Allocates and frees at random until it is killed; says once that it has begun. */
static void churn(unsigned seed) {
    CUdeviceptr held[64] = {0};
    puts("0 0 0");
    fflush(stdout);
    for (;;) {
        CUdeviceptr *p = &held[rand_r(&seed) % 64];
        if (*p) {
            p_cuMemFree_v2(*p);
            *p = 0;
        } else if (p_cuMemAlloc_v2(p, (size_t)(rand_r(&seed) % 4096 + 1) << 16))
            *p = 0;
    }
}

/* Takes and gives back again and again; how often it was granted. */
static size_t fight(size_t bytes, long long times) {
    size_t granted = 0;
    CUdeviceptr p;
    while (times-- > 0)
        if (p_cuMemAlloc_v2(&p, bytes) == CUDA_SUCCESS) {
            granted++;
            p_cuMemFree_v2(p);
        }
    return granted;
}

static void *take_and_give(void *context) {
    CUdeviceptr held[100] = {0};
    p_cuCtxSetCurrent(context);
    for (int i = 0; i < 50000; i++) {
        CUdeviceptr *p = &held[i * 7919 % 100];
        if (*p)
            p_cuMemFree_v2(*p);
        if (p_cuMemAlloc_v2(p, 4096 * (i % 50 + 1)))
            *p = 0;
    }
    for (int i = 0; i < 100; i++)
        if (held[i])
            p_cuMemFree_v2(held[i]);
    return NULL;
}

static CUresult in_threads(CUcontext context, int count) {
    pthread_t threads[16];
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, take_and_give, context);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return CUDA_SUCCESS;
}

/* In a forked child: one allocation, its answer as the exit status. */
static int in_child(size_t bytes) {
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        CUdeviceptr p;
        _exit((int)p_cuMemAlloc_v2(&p, bytes));
    }
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

/* A child that waits until it is killed and never calls the driver. `raw`: without the handlers of fork. */
static pid_t idle_child(bool raw) {
    pid_t child = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
    if (child != 0)
        return child;
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    for (;;)
        pause();
}

/* Children forked while other threads are in the middle of everything: how many of them got their memory. */
static size_t children_of_threads(CUcontext context, int count) {
    pthread_t threads[4];
    size_t granted = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, take_and_give, context);
    for (int i = 0; i < count; i++)
        granted += in_child(1 << 20) == CUDA_SUCCESS;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    return granted;
}

/* Touches a page that no file is behind: whether the program's own handler, if it has one, was called. */
static sigjmp_buf back;
static void own_handler(int number) { siglongjmp(back, number); }
static CUresult fault(void) {
    int empty = (int)syscall(SYS_memfd_create, "empty", 0u); /* older libc lacks the call */
    volatile char *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, empty, 0);
    if (sigsetjmp(back, 1))
        return CUDA_SUCCESS;
    return page[0] ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_UNKNOWN;
}

static CUresult answer(const char *what, long long a, long long b, unsigned long long *x, unsigned long long *y) {
    CUdeviceptr p = 0;
    CUcontext context = NULL;
    size_t first = 0, second = 0;
    CUresult result = CUDA_ERROR_UNKNOWN;
    if (!strcmp(what, "init"))
        return p_cuInit(0);
    if (!strcmp(what, "handler"))
        return signal(SIGBUS, own_handler) == SIG_ERR ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    if (!strcmp(what, "fault"))
        return fault();
    if (!strcmp(what, "count")) {
        int count = 0;
        result = p_cuDeviceGetCount(&count);
        first = (size_t)count;
    } else if (!strcmp(what, "context")) {
        result = p_cuCtxCreate_v2(&context, 0, (int)a);
        p = (CUdeviceptr)context;
    } else if (!strcmp(what, "destroy"))
        result = p_cuCtxDestroy_v2((CUcontext)a);
    else if (!strcmp(what, "retain")) {
        result = p_cuDevicePrimaryCtxRetain(&context, (int)a);
        p_cuCtxSetCurrent(context);
    } else if (!strcmp(what, "unretain"))
        result = p_cuDevicePrimaryCtxRelease_v2((int)a);
    else if (!strcmp(what, "reset"))
        result = p_cuDevicePrimaryCtxReset_v2((int)a);
    else if (!strcmp(what, "total"))
        result = p_cuDeviceTotalMem_v2(&first, (int)a);
    else if (!strcmp(what, "info"))
        result = p_cuMemGetInfo_v2(&first, &second);
    else if (!strcmp(what, "info-of-nothing"))
        result = p_cuMemGetInfo_v2(NULL, NULL);
    else if (!strcmp(what, "alloc"))
        result = p_cuMemAlloc_v2(&p, (size_t)a);
    else if (!strcmp(what, "managed"))
        result = p_cuMemAllocManaged(&p, (size_t)a, CU_MEM_ATTACH_GLOBAL);
    else if (!strcmp(what, "pitch"))
        result = p_cuMemAllocPitch_v2(&p, &second, (size_t)a, (size_t)b, 4);
    else if (!strcmp(what, "async"))
        result = p_cuMemAllocAsync(&p, (size_t)a, NULL);
    else if (!strcmp(what, "free"))
        result = p_cuMemFree_v2((CUdeviceptr)a);
    else if (!strcmp(what, "free-async"))
        result = p_cuMemFreeAsync((CUdeviceptr)a, NULL);
    else if (!strcmp(what, "pool")) {
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = at(a)};
        result = p_cuMemPoolCreate((CUmemoryPool *)&p, &properties);
    } else if (!strcmp(what, "from-pool"))
        result = p_cuMemAllocFromPoolAsync(&p, (size_t)a, (CUmemoryPool)b, NULL);
    else if (!strcmp(what, "block")) {
        CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = at(b)};
        result = p_cuMemCreate(&p, (size_t)a, &properties, 0);
    } else if (!strcmp(what, "release"))
        result = p_cuMemRelease((CUmemGenericAllocationHandle)a);
    else if (!strcmp(what, "map")) /* of 1 GiB, at an address that the test chooses */
        result = p_cuMemMap((CUdeviceptr)b, 1 << 30, 0, (CUmemGenericAllocationHandle)a, 0);
    else if (!strcmp(what, "unmap"))
        result = p_cuMemUnmap((CUdeviceptr)a, (size_t)b);
    else if (!strcmp(what, "array") || !strcmp(what, "mipmap")) {
        CUDA_ARRAY3D_DESCRIPTOR d = {.Width = (size_t)a, .Height = (size_t)b, .NumChannels = 4,
                                     .Format = CU_AD_FORMAT_FLOAT};
        result = *what == 'a' ? p_cuArray3DCreate_v2((CUarray *)&p, &d)
                              : p_cuMipmappedArrayCreate((CUmipmappedArray *)&p, &d, 3);
    } else if (!strcmp(what, "array-destroy"))
        result = p_cuArrayDestroy((CUarray)a);
    else if (!strcmp(what, "mipmap-destroy"))
        result = p_cuMipmappedArrayDestroy((CUmipmappedArray)a);
    else if (!strcmp(what, "graph")) {
        CUgraphNode node;
        CUDA_MEM_ALLOC_NODE_PARAMS n = {.bytesize = (size_t)a, .poolProps.location = at(0)};
        result = p_cuGraphAddMemAllocNode(&node, NULL, NULL, 0, &n);
        p = n.dptr;
    } else if (!strcmp(what, "fight")) {
        first = fight((size_t)a, b);
        result = CUDA_SUCCESS;
    } else if (!strcmp(what, "threads"))
        result = in_threads((CUcontext)a, (int)b);
    else if (!strcmp(what, "children")) {
        first = children_of_threads((CUcontext)a, (int)b);
        result = CUDA_SUCCESS;
    } else if (!strcmp(what, "child"))
        result = (CUresult)in_child((size_t)a);
    else if (!strcmp(what, "idle"))
        first = (unsigned long long)idle_child(a);
    *x = p ? p : first;
    *y = second;
    return result;
}

int main(int argc, char **argv) {
    char line[128], what[32];
    (void)argc;
    load();
    setvbuf(stdin, NULL, _IONBF, 0); /* the next program after exec must find the rest of the lines */
    while (fgets(line, sizeof line, stdin)) {
        long long a = 0, b = 0;
        unsigned long long x = 0, y = 0;
        sscanf(line, "%31s %lld %lld", what, &a, &b);
        if (!strcmp(what, "churn"))
            churn((unsigned)a);
        if (!strcmp(what, "exec"))
            execv("/proc/self/exe", argv);
        CUresult result = answer(what, a, b, &x, &y);
        printf("%d %llu %llu\n", (int)result, x, y);
        fflush(stdout);
    }
    return 0;
}
