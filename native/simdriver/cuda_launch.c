/* Launches, which take time on the card's time line, and occupancy queries. */
#include "graph.h"
#include "timeline.h"

#define MAX_THREADS 1024
#define WARP 32

static CUresult launch(const CUDA_KERNEL_NODE_PARAMS *what, CUstream stream_handle) {
    CUcontext context;
    CUstream stream;
    struct CUfunc_st *function;
    TRY(stream_resolve(stream_handle, &context, &stream));
    TRY(function_resolve(what->func, &function));
    uint64_t blocks = (uint64_t)what->gridDimX * what->gridDimY * what->gridDimZ;
    uint64_t threads = (uint64_t)what->blockDimX * what->blockDimY * what->blockDimZ;
    if (blocks == 0 || threads == 0 || threads > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    bool taken;
    struct graph_work work = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *what};
    TRY(capture_work(context, stream, &work, &taken));
    if (taken)
        return CUDA_SUCCESS;
    uint64_t duration_ns = context_duration(context, function->duration_ns);
    stream_extend(context, stream, timeline_add(context->card, duration_ns));
    events_settle(context->card);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **parameters, void **extra) {
    CUDA_KERNEL_NODE_PARAMS what = {function, grid_x,       grid_y,     grid_z, block_x, block_y,
                                    block_z,  shared_bytes, parameters, extra,  NULL,    NULL};
    return launch(&what, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, parameters,
                          extra);
}

/* Not generated, because the stream is in the struct. */
CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    CUlaunchConfig own = *config;
    own.hStream = own.hStream ? own.hStream : CU_STREAM_PER_THREAD;
    return cuLaunchKernelEx(&own, function, parameters, extra);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                   unsigned int shared_bytes, CUstream stream, void **parameters) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters,
                          NULL);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int threads,
                                                              size_t shared_bytes, unsigned int flags) {
    struct CUfunc_st *function;
    (void)shared_bytes, (void)flags;
    TRY(driver_ready());
    TRY(function_resolve(handle, &function));
    if (!blocks || threads <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    int rounded = (threads + WARP - 1) / WARP * WARP;
    *blocks = rounded > MAX_THREADS ? 0 : MAX_THREADS / rounded < 16 ? MAX_THREADS / rounded : 16;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                     size_t shared_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle,
                                                   CUoccupancyB2DSize shared_of, size_t shared_bytes, int limit,
                                                   unsigned int flags) {
    CUcontext context;
    struct CUfunc_st *function;
    (void)shared_of, (void)shared_bytes, (void)flags;
    TRY(context_current(&context));
    TRY(function_resolve(handle, &function));
    if (!grid || !block)
        return CUDA_ERROR_INVALID_VALUE;
    *block = limit > 0 && limit < MAX_THREADS ? limit : MAX_THREADS;
    *grid = (int)node_state->cards[context->card].sm_count;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared_of,
                                          size_t shared_bytes, int limit) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared_bytes, limit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int threads) {
    CUdevice device;
    struct CUfunc_st *function;
    int whole, reserved;
    TRY(cuCtxGetDevice(&device));
    TRY(function_resolve(handle, &function));
    if (!bytes || blocks <= 0 || threads <= 0 || threads > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(cuDeviceGetAttribute(&whole, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, device));
    TRY(cuDeviceGetAttribute(&reserved, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, device));
    int each = whole / blocks - reserved - function->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES];
    int most;
    TRY(cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device));
    *bytes = each < 0 ? 0 : each < most ? (size_t)each : (size_t)most;
    return CUDA_SUCCESS;
}

/* ---- clusters: blocks that run together, since compute capability 9.0 ---- */

#define CLUSTER_CAPABILITY 9
#define CLUSTER 8 /* blocks, in every program; 16 where a function allows what not all cards have */

static CUresult cluster_card(CUfunction handle, const CUlaunchConfig *config, uint32_t *card,
                             struct CUfunc_st **function) {
    CUcontext context;
    TRY(context_current(&context));
    TRY(function_resolve(handle, function));
    *card = context->card;
    if (node_state->cards[*card].compute_major < CLUSTER_CAPABILITY)
        return CUDA_ERROR_NOT_SUPPORTED;
    return config && (config->numAttrs == 0 || config->attrs) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static unsigned cluster_of(const CUlaunchConfig *config) {
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            return config->attrs[i].value.clusterDim.x * config->attrs[i].value.clusterDim.y *
                   config->attrs[i].value.clusterDim.z;
    return 1;
}

CUresult cuOccupancyMaxPotentialClusterSize(int *blocks, CUfunction handle, const CUlaunchConfig *config) {
    uint32_t card;
    struct CUfunc_st *function;
    TRY(cluster_card(handle, config, &card, &function));
    if (!blocks)
        return CUDA_ERROR_INVALID_VALUE;
    bool larger = function->attributes[CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED];
    *blocks = larger ? 2 * CLUSTER : CLUSTER;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle, const CUlaunchConfig *config) {
    uint32_t card;
    int most, each;
    struct CUfunc_st *function;
    TRY(cluster_card(handle, config, &card, &function));
    TRY(cuOccupancyMaxPotentialClusterSize(&most, handle, config));
    unsigned blocks = cluster_of(config);
    if (!clusters || blocks == 0 || blocks > (unsigned)most)
        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    TRY(cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &each, handle, (int)(config->blockDimX * config->blockDimY * config->blockDimZ), config->sharedMemBytes));
    *clusters = each * (int)device_multiprocessors(card) / (int)blocks;
    return CUDA_SUCCESS;
}
