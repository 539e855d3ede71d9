/* Graphs: recorded work, added node by node or by capturing a stream. */
#ifndef FENKA_SIMULATED_GRAPH_H
#define FENKA_SIMULATED_GRAPH_H
#include "driver.h"

/* An address range of an allocation node, kept while any node or executable graph uses it. */
struct graph_memory {
    uintptr_t base;
    size_t size;
    CUdevice device;
    unsigned holders;
    struct graph_memory *previous, *next;
};

struct graph_work {
    CUgraphNodeType type;
    union {
        CUDA_KERNEL_NODE_PARAMS kernel;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS set;
        CUDA_HOST_NODE_PARAMS host;
        CUevent event;
        CUdeviceptr freed;
        struct {
            struct graph_memory *memory;
            CUDA_MEM_ALLOC_NODE_PARAMS asked;
        } taken;
    };
};

struct CUgraphNode_st {
    struct object object;
    CUgraph graph;
    struct graph_work work;
    size_t needs_count;
    CUgraphNode *needs;
    CUgraphNode next;
    bool placed; /* while the nodes are being ordered */
};

struct CUgraph_st {
    struct object object;
    size_t count;
    CUgraphNode first, last;
};

CUgraph graph_new(void);
/* Whether these are nodes of the graph. */
bool graph_needs_fit(CUgraph graph, const CUgraphNode *needs, size_t count);
void graph_delete(CUgraph graph);
CUresult graph_add(CUgraph graph, const CUgraphNode *needs, size_t count, const struct graph_work *work,
                   CUgraphNode *out);
/* The memory of an allocation node that is to be added. */
CUresult graph_memory_new(CUdevice device, size_t bytes, struct graph_memory **out);
/* Backs the range with memory, at a launch. free_first: gives back what an earlier launch has left there. */
CUresult graph_memory_take(const struct graph_memory *memory, CUcontext context, bool free_first);
void graph_memory_hold(struct graph_memory *memory, int change);
/* Whether the address is an allocation node's. */
bool graph_memory_known(CUdeviceptr address);
/* Does it, in the stream's turn. */
CUresult graph_work_run(const struct graph_work *work, CUcontext context, CUstream stream, bool free_first);
#endif
