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
        CUgraph child; /* the node's own copy */
        struct {
            CUgraphConditionalHandle handle;
            CUgraphConditionalNodeType kind;
            unsigned size;
            CUgraph *bodies;
        } condition;
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
    CUcontext context; /* as the program named it; NULL = the current one at the launch */
    void *arguments;   /* a kernel's, copied */
    size_t needs_count;
    CUgraphNode *needs;
    CUgraphEdgeData *edges; /* as many as needs */
    CUgraphNode next;
    bool placed; /* while the nodes are being ordered */
    bool disabled;
    uint64_t capture;               /* in which it was recorded, or 0 */
    unsigned number;                /* in its graph */
    uint64_t id;                    /* never used twice */
    uint64_t origin;                /* the id of the node of which this is a copy, or 0 */
    CUgraphNode twin;               /* while a graph is being copied */
    CUlaunchAttributeValue *launch; /* by attribute; NULL = none was set */
};

struct graph_user;
struct graph_condition;
struct CUgraph_st {
    struct object object;
    size_t count;
    CUgraphNode first, last;
    unsigned id;
    unsigned nodes_made;
    bool inner; /* of a child node or a conditional node, which destroys it */
    struct graph_user *users;
    struct graph_condition *conditions;
};

CUgraph graph_new(void);
CUgraphNode graph_node(CUgraphNode node);
/* Whether these are nodes of the graph. */
bool graph_needs_fit(CUgraph graph, const CUgraphNode *needs, size_t count);
void graph_delete(CUgraph graph);
void graph_remove(CUgraphNode node);
CUresult graph_add(CUgraph graph, const CUgraphNode *needs, size_t count, const struct graph_work *work,
                   CUgraphNode *out);
/* Adds a dependency, or removes the one with the same ends. */
CUresult graph_link(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *edge);
bool graph_unlink(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *edge);
/* graph_clone.c. A copy with all inner graphs, memory and users; NULL without memory. */
CUgraph graph_clone(CUgraph graph);
/* The copy of the node in a copy of its graph, also in an inner graph; or NULL. */
CUgraphNode graph_find(CUgraph copy, CUgraphNode original);
/* Whether the graph, or one inside it, has a node of that type. */
bool graph_has(CUgraph graph, CUgraphNodeType type);
/* Sets the work of a node; the old work is released. */
void graph_set_work(CUgraphNode node, const struct graph_work *work);
void graph_work_release(const struct graph_work *work);
/* Copies a kernel's arguments into the node; those of an unknown layout are dropped. */
CUresult graph_copy_arguments(CUgraphNode node);

/* The memory of an allocation node that is to be added. */
CUresult graph_memory_new(CUdevice device, size_t bytes, struct graph_memory **out);
/* Backs the range with memory, at a launch. free_first: gives back what an earlier launch has left there. */
CUresult graph_memory_take(const struct graph_memory *memory, CUcontext context, bool free_first);
void graph_memory_hold(struct graph_memory *memory, int change);
/* Whether the address is an allocation node's. */
bool graph_memory_known(CUdeviceptr address);
/* Does it, in the stream's turn. */
CUresult graph_work_run(const struct graph_work *work, CUcontext context, CUstream stream, bool free_first);

/* ---- cuda_graph_exec.c ---- */
/* The executable graph's own copy of a node; NULL where it has none. */
CUgraphNode graph_exec_node(CUgraphExec exec, CUgraphNode node);

/* ---- cuda_graph_condition.c ---- */
bool graph_condition_known(CUgraph graph, CUgraphConditionalHandle handle);
/* Kernels compute nothing, so the value at a launch is the handle's default one. */
unsigned graph_condition_value(CUgraph graph, CUgraphConditionalHandle handle);
bool graph_conditions_copy(CUgraph from, CUgraph to);
void graph_conditions_free(CUgraph graph);

/* ---- cuda_user_object.c ---- */
bool graph_users_copy(CUgraph from, CUgraph to);
void graph_users_release(CUgraph graph);
#endif
