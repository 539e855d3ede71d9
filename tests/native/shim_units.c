/* The shim's parts in one program, for sanitizers: they cannot see into a library that is preloaded, and it
 * stands in the way of their own dlsym. Only the resolver is another one: it asks the null driver directly.
 *
 * Arguments: the null driver, a lease's folder, what to do. Exit status 0 = all held. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "allocations.h"
#include "context_state.h"
#include "control.h"
#include "fenka/lease.h"
#include "lease.h"
#include "resolve.h"
#include "resolve_driver.h"

#define CHECK(what)                                                      \
    do {                                                                 \
        if (!(what)) {                                                   \
            fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #what);   \
            exit(1);                                                     \
        }                                                                \
    } while (0)

void *resolve_table[FUNCTIONS];
static void *driver;

static const char *const names[FUNCTIONS] = {
#define CUDA_HOOK(role, name, base, since, per_thread) #name,
#define CUDA_USE(name) #name,
#define NVML_HOOK(name) NULL,
#define NVML_USE(name) NULL,
#include "hooks.h"
};

/* The driver is in this program's namespace, so its environment is the program's. */
struct dl_functions dl_original;
void dl_find_original(void) { dl_original.dlsym = dlsym; }

void *resolve(enum function f) {
    void *real = names[f] ? dlsym(driver, names[f]) : NULL;
    __atomic_store_n(&resolve_table[f], real, __ATOMIC_RELEASE);
    return real;
}

CUresult resolve_no_cuda(void) { return CUDA_ERROR_NOT_FOUND; }
nvmlReturn_t resolve_no_nvml(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }

/* The hooks that the resolver defines itself. */
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    return REAL(cuGetProcAddress)(symbol, function, version, flags);
}

static CUcontext context;

static void nothing(void) {}
static const char *folder;

static void enter(void) {
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS);
}

static unsigned next(unsigned *seed) {
    return (unsigned)rand_r(seed);
}

static CUmemLocation here(void) {
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
}

/* One of everything that is taken and given back; refused or not, it leaves nothing. */
static void take_one(unsigned *seed) {
    size_t bytes = (size_t)(next(seed) % 64 + 1) << 16, pitch;
    CUmemAllocationProp block = {.location = here()};
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = bytes / 64, .Height = 16, .NumChannels = 4};
    CUDA_MEM_ALLOC_NODE_PARAMS p = {.bytesize = bytes, .poolProps.location = here()};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr pointer, place = (CUdeviceptr)(next(seed) % 4096 + 1) << 32 | (uintptr_t)pthread_self() << 8 >> 24;
    CUarray array;
    CUgraphExec exec;
    CUgraphNode node;
    CUgraph graph = (CUgraph)((uintptr_t)seed | 1);
    switch (next(seed) % 6) {
    case 0:
        if (!cuMemAlloc_v2(&pointer, bytes))
            CHECK(!cuMemFree_v2(pointer));
        break;
    case 1:
        if (!cuMemAllocPitch_v2(&pointer, &pitch, bytes / 8, 8, 4))
            CHECK(!cuMemFreeAsync(pointer, NULL));
        break;
    case 2:
        if (cuMemCreate(&handle, bytes, &block, 0))
            break;
        if (next(seed) % 64 == 0) {
            int descriptor = -1;
            CHECK(!cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
            CHECK(close(descriptor) == 0);
        }
        CHECK(!cuMemMap(place, bytes, 0, handle, 0) && !cuMemRelease(handle) && !cuMemUnmap(place, bytes));
        break;
    case 3:
        if (!cuArray3DCreate_v2(&array, &shape))
            CHECK(!cuArrayDestroy(array));
        break;
    case 4:
        if (cuGraphAddMemAllocNode(&node, graph, NULL, 0, &p))
            break;
        CHECK(!cuGraphInstantiateWithFlags(&exec, graph, 0) && !cuGraphDestroy(graph) && !cuGraphExecDestroy(exec));
        break;
    default:
        CHECK(!cuMemGetInfo_v2(&bytes, &pitch));
    }
}

static void *churn(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    CUcontext own = NULL;
    CHECK(cuDevicePrimaryCtxRetain(&own, 0) == CUDA_SUCCESS);
    ((CUresult(*)(CUcontext))dlsym(driver, "cuCtxSetCurrent"))(context);
    for (int i = 0; i < 4000; i++)
        take_one(&seed);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    return NULL;
}

/* The agent's part: limits that change, and generations that are odd for a while. */
static void *resize(void *argument) {
    char path[4096];
    snprintf(path, sizeof path, "%s/lease/control", folder);
    int fd = open(path, O_RDWR);
    struct fenka_control *page = mmap(NULL, FENKA_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED);
    while (!__atomic_load_n((bool *)argument, __ATOMIC_ACQUIRE)) {
        uint64_t generation = __atomic_add_fetch(&page->generation, 1, __ATOMIC_SEQ_CST);
        __atomic_store_n(&page->cards[0].memory_bytes, (generation % 7 + 1) << 20, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&page->generation, 1, __ATOMIC_SEQ_CST);
    }
    munmap(page, FENKA_CONTROL_BYTES);
    close(fd);
    return NULL;
}

static void threads(void) {
    pthread_t workers[4], agent;
    bool done = false;
    enter();
    pthread_create(&agent, NULL, resize, &done);
    for (uintptr_t i = 0; i < 4; i++)
        pthread_create(&workers[i], NULL, churn, (void *)(i + 1));
    for (int i = 0; i < 4; i++)
        pthread_join(workers[i], NULL);
    __atomic_store_n(&done, true, __ATOMIC_RELEASE);
    pthread_join(agent, NULL);
    CHECK(account_used(0, nothing) == 0);
    CHECK(cuCtxDestroy_v2(context) == CUDA_SUCCESS);
}

/* Everything by one thread, so that it can be repeated to the letter. */
static void calls(void) {
    unsigned seed = 7;
    enter();
    for (int i = 0; i < 20000; i++)
        take_one(&seed);
    CHECK(account_used(0, nothing) == 0);
    CHECK(cuMemAlloc_v2(&(CUdeviceptr){0}, 5ull << 30) == CUDA_ERROR_OUT_OF_MEMORY);
    pid_t child = fork();
    if (child == 0)
        _exit(cuMemAlloc_v2(&(CUdeviceptr){0}, 1 << 20) != CUDA_SUCCESS);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(cuMemAlloc_v2(&(CUdeviceptr){0}, 4ull << 30) == CUDA_SUCCESS); /* nothing is left of the child's */
}

/* The table of holdings against a plain array. */
static void allocations(void) {
    enum { KEYS = 3000 };
    static struct allocation model[KEYS];
    unsigned seed = 3;
    for (int i = 0; i < 200000; i++) {
        uint64_t k = next(&seed) % KEYS, key = k << 21;
        struct allocation got = {0};
        switch (next(&seed) % 5) {
        case 0: {
            struct allocation new = {key, next(&seed), k % 3, 1, BLOCK, 0};
            CHECK(allocations_put(new, &got) && got.kind == model[k].kind);
            CHECK(got.kind == NOTHING || got.bytes == model[k].bytes);
            model[k] = new;
            break;
        }
        case 1:
            CHECK(allocations_retain(BLOCK, key) == (model[k].kind == BLOCK));
            model[k].references++;
            break;
        case 2: {
            bool last = model[k].kind == BLOCK && model[k].references == 1;
            CHECK(allocations_release(BLOCK, key, &got) == last && (!last || got.bytes == model[k].bytes));
            model[k].references--;
            if (last)
                model[k].kind = NOTHING;
            break;
        }
        case 3:
            CHECK(allocations_take(BLOCK, key, &got) == (model[k].kind == BLOCK));
            model[k].kind = NOTHING;
            break;
        default:
            CHECK(allocations_find(BLOCK, key, &got) == (model[k].kind == BLOCK));
            CHECK(model[k].kind == NOTHING || got.references == model[k].references);
        }
    }
}

static void owners(void) {
    struct allocation old, gone;
    uint64_t sums[3] = {0}, found;
    for (uint64_t i = 0; i < 5000; i++) {
        CHECK(allocations_put((struct allocation){i << 9, i, i % 3 + 1, 1, i % 2 ? POINTER : MIPMAP, 0}, &old));
        sums[i % 3] += i;
    }
    for (uint64_t owner = 3; owner >= 1; owner--) {
        unsigned shard = 0;
        for (found = 0; allocations_take_owned(&shard, owner, &gone); found += gone.bytes)
            CHECK(gone.owner == owner);
        CHECK(found == sums[owner - 1]);
    }
    CHECK(!allocations_find(POINTER, 1 << 9, &gone));
}

/* One fault of each kind, so that a run without a finding means something. */
static int volatile shared_word;
static void *race(void *argument) {
    for (int i = 0; i < 100000; i++)
        shared_word++;
    return argument;
}

static void plant_thread(void) {
    pthread_t one;
    pthread_create(&one, NULL, race, NULL);
    race(NULL);
    pthread_join(one, NULL);
}

static void plant_address(void) {
    volatile char *bytes = malloc(8);
    bytes[strlen(folder) > 0 ? 8 : 0] = 1;
    free((void *)bytes);
}

static void plant_undefined(void) {
    int volatile most = 0x7fffffff;
    most = most + (int)strlen(folder);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"threads", threads}, {"calls", calls}, {"allocations", allocations}, {"owners", owners},
    {"plant-thread", plant_thread}, {"plant-address", plant_address}, {"plant-undefined", plant_undefined},
};

int main(int argc, char **argv) {
    CHECK(argc == 4);
    driver = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    CHECK(driver);
    folder = argv[2];
    setenv("FENKA_LEASE", folder, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, argv[3])) {
            cases[i].run();
            return 0;
        }
    return 2;
}
