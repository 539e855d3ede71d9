/* The interfaces between the parts of the simulated CUDA driver. */
#ifndef FENKA_SIMULATED_DRIVER_H
#define FENKA_SIMULATED_DRIVER_H
#include "driver_header.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "mig.h"
#include "node.h"
#include "timeline.h"

#define TRY(call)                   \
    do {                            \
        CUresult tried_ = (call);   \
        if (tried_ != CUDA_SUCCESS) \
            return tried_;          \
    } while (0)

/* ---- driver_state.c: the process and the devices it sees ---- */
extern bool driver_initialised;
extern int device_count;
/* Ordinal -> index of the card in the node, in the order of CUDA_VISIBLE_DEVICES. */
extern uint32_t device_cards[FENKA_NODE_CARDS];
/* The error to return if the process has not called cuInit, or the card server has ended. */
CUresult driver_ready(void);
CUresult device_card(CUdevice device, uint32_t *card);
/* The process's instance on a card; false where it has the whole card. A process has one at most. */
bool device_instance(uint32_t card, struct mig_instance *instance);
/* False if the instance has been destroyed, or the card divided, since cuInit. */
bool device_present(uint32_t card);
uint32_t device_multiprocessors(uint32_t card);
/* How long a kernel takes there that takes so long on the whole card. */
uint64_t device_duration(uint32_t card, uint64_t duration_ns);
/* A number that processes have in common if they can map each other's memory. */
uint32_t device_memory(uint32_t card);
/* CUDA_ERROR_UNKNOWN for a card that has fallen off the bus: CUDA has no better error. */
static inline CUresult card_ready(uint32_t card) { return node_card_lost(card) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS; }
/* The CUDA version of which a program gets functions that asks for those of this one: no newer one than the node's. */
int driver_version_of(int asked);
uint32_t environment_number(const char *name, uint32_t otherwise);
/* ---- cuda_visible.c ---- */
int visible_cards(const char *wish, const struct fenka_node *node, uint32_t *cards, uint32_t *marks);

/* ---- objects.c: handles ---- */
enum object_kind {
    STREAM = 1,
    EVENT,
    MODULE,
    FUNCTION,
    POOL,
    HANDLE,
    ARRAY,
    MIPMAP,
    GRAPH,
    NODE,
    EXEC,
    USER_OBJECT,
    TEXTURE,
    RESOURCES_OF_DEVICE,
    GREEN,
    OBJECT_KINDS
};
struct object {
    uint32_t kind; /* 0 = deleted */
    uint32_t life; /* of the context when this was made */
    CUcontext context;
    struct object *next;
};
/* Zeroed. A deleted object's memory is reused for its own kind and never freed, so that stale handles are recognised
 * safely. */
void *object_new(enum object_kind kind, size_t bytes, CUcontext context);
void object_delete(void *object);
/* NULL where the handle is not a live object of that kind or its context is gone. */
void *object_get(const void *handle, enum object_kind kind);
void objects_after_fork(void);

/* ---- contexts ---- */
#define CONTEXT_MAGIC 0x58544353u
#define CONTEXT_LIMITS 16
struct CUctx_st {
    uint32_t magic;
    uint32_t card;
    CUdevice device;
    bool primary;
    bool alive;
    uint32_t life; /* changes when a primary context is reset */
    unsigned flags;
    unsigned references;
    uint64_t id;
    uint64_t end;            /* position of the end of all its work on the card's time line */
    unsigned host_functions; /* enqueued and not yet called */
    size_t limits[CONTEXT_LIMITS];
    CUgreenCtx green;         /* whose context this is, or NULL */
    unsigned multiprocessors; /* that it has; 0 = all */
    struct CUctx_st *next;
};
/* context_stack.c: the calling thread's stack. context_push requires a stack that is not full. */
CUresult context_current(CUcontext *context);
bool context_valid(CUcontext context);
CUcontext context_top(void);
bool context_stack_full(void);
void context_push(CUcontext context);
bool context_pop(CUcontext *context);
void context_set_top(CUcontext context);
void context_stack_after_fork(void);
/* cuda_context.c */
/* A context with a part of the device's multiprocessors, which holds the primary context; and its end. */
CUresult context_of_part(CUcontext *context, CUdevice device, unsigned multiprocessors);
CUresult context_part_end(CUcontext context);
/* Whether events of one can stand for work of the other: a green context belongs to its primary one. */
bool context_shares(CUcontext one, CUcontext other);
/* How long a kernel takes there that takes so long on the whole card. */
uint64_t context_duration(CUcontext context, uint64_t duration_ns);
void contexts_after_fork(void);
static inline void raise_to(uint64_t *at, uint64_t value) {
    uint64_t seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
}

/* ---- capture.c ---- */
struct capture;
struct graph_work;
/* The last nodes of a captured stream, or those that an event stands for. */
struct tips {
    CUgraphNode *nodes;
    size_t count;
};
bool stream_capturing(CUstream stream);
/* *taken: the stream is being captured, and the work now belongs to the graph. */
CUresult capture_work(CUcontext context, CUstream stream, const struct graph_work *work, bool *taken);
/* An error if a call that may wait for the device would invalidate a capture. */
CUresult capture_unsafe(void);
/* The same for queries of the stream, and for waiting for the whole context. */
CUresult capture_refuse(CUcontext context, CUstream stream);
CUresult capture_all_refuse(CUcontext context);
/* True if the event now stands for a place in a graph. */
bool capture_record(CUevent event, CUstream stream);
CUresult capture_wait(CUevent event, CUstream stream, bool *taken);
bool capture_knows(CUevent event);
void capture_lose(CUstream stream);
/* `into`: the graph that gets the nodes, or NULL for a new one. `tips`: what the first node depends on. */
CUresult capture_begin(CUstream stream, CUstreamCaptureMode mode, CUgraph into, const struct tips *tips);
CUresult capture_depend(CUstream stream, const struct tips *tips, bool instead);
void captures_drop(CUcontext context);
CUresult capture_end(CUstream stream, CUgraph *graph);
struct capture_info {
    CUstreamCaptureStatus status;
    /* If active: */
    uint64_t id;
    CUgraph graph;
    struct tips tips;
};
CUresult capture_info(CUcontext context, CUstream stream, struct capture_info *info);
/* Sets the calling thread's mode and returns the one before. */
CUstreamCaptureMode capture_exchange_mode(CUstreamCaptureMode mode);
void captures_after_fork(void);

/* ---- graph_memory.c ---- */
void graph_memory_after_fork(void);

/* ---- cuda_memset.c ---- */
CUresult set_rows(const CUDA_MEMSET_NODE_PARAMS *what);

/* ---- streams.c ---- */
struct CUstream_st {
    struct object object;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t end;
    struct capture *capture;
    struct tips tips;
    CUstream member;  /* the next stream of the capture */
    CUstream sibling; /* the next of the thread's own streams */
};
/* NULL and the legacy handle mean the current context's own line: *stream is NULL. The per-thread
 * handle means a stream that belongs to the calling thread. */
CUresult stream_resolve(CUstream handle, CUcontext *context, CUstream *stream);
CUstream stream_new(CUcontext context);
uint64_t stream_end(CUcontext context, CUstream stream);
void stream_extend(CUcontext context, CUstream stream, uint64_t end);

/* Sleeps until all work of the stream, or of the context, is done. */
void stream_wait(CUcontext context, CUstream stream);
void streams_after_fork(void);
bool stream_done(CUcontext context, CUstream stream);

/* ---- events.c ---- */
/* The moment that an event marks; in shared memory for events of several processes. */
struct moment {
    struct timeline_place place;
    uint64_t at_ns; /* 0 until it is queried after it was reached */
    uint64_t recorded;
};
struct CUevent_st {
    struct object object;
    unsigned flags;
    bool imported;
    off_t offset; /* in the arena, of an event for other processes */
    struct moment *moment, own;
    CUevent later, sooner; /* in the list of the card's events whose time is not known yet */
    uint64_t capture_id;   /* of the capture in which it was recorded last */
    struct tips tips;
};
/* The place of an interprocess event's moment. */
CUresult event_offset(CUevent event, off_t *offset);
/* Records the times of events that were reached, before the time line drops them. */
void events_settle(uint32_t card);
void events_after_fork(void);
CUresult event_from(CUevent *event, CUcontext context, struct moment *theirs);
/* Records the event at this position of the card's line. */
void event_mark(CUevent event, uint32_t card, uint64_t position);
bool event_done(CUevent event);
void event_unlist(CUevent event);

/* ---- cuda_green.c ---- */
/* Of a green context its own part, else the device's. */
CUresult green_resource(CUcontext context, CUdevResource *resource, CUdevResourceType type);

/* ---- cuda_stream.c ---- */
CUresult stream_make(CUstream *stream, CUcontext context, unsigned flags, int priority);

/* ---- cuda_coredump.c ---- */
void coredump_after_fork(void);

/* ---- host_functions.c ---- */
struct host_call {
    struct timeline_place at;
    CUcontext context;
    CUstream stream;
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
    struct host_call *next;
};
/* Copies the call. False if there is no memory or no thread for it. */
bool host_function_add(const struct host_call *call);
void host_functions_wait(CUcontext context);
void host_functions_after_fork(void);

/* ---- memory.c ---- */
enum memory_kind {
    MEMORY_DEVICE,
    MEMORY_MANAGED,
    MEMORY_HOST,
    MEMORY_REGISTERED,
    MEMORY_MAPPED,
    MEMORY_ARRAY,    /* its address is not visible to programs */
    MEMORY_GRAPH,    /* of an allocation node */
    MEMORY_IMPORTED, /* another process's, and charged to it */
    MEMORY_VARIABLE, /* of a module, and charged with it */
};
#define HOST_ACCESS FENKA_NODE_CARDS
struct memory_handle;
struct allocation {
    uintptr_t base;
    size_t size;    /* as requested */
    size_t charged; /* to the card, or to the pool; else 0 for host memory */
    size_t mapped;  /* 0 = from malloc */
    off_t offset;   /* of device memory in the arena, where it takes `charged` bytes */
    enum memory_kind kind;
    unsigned flags;
    uint64_t id;
    CUcontext context;
    uint32_t card;
    CUdevice device;
    CUmemoryPool pool;
    bool shared; /* pages of a memory file, which other mappings may show as well */
    /* MEMORY_MAPPED, which belongs to no context: */
    struct memory_handle *handle;
    uint8_t access[FENKA_NODE_CARDS + 1]; /* CUmemAccess_flags by ordinal, last the host's */
    /* Frees what its kind needs; NULL for allocations that memory.c makes. */
    void (*release)(const struct allocation *held);
    struct allocation *previous, *next;
};
CUresult memory_new(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags, struct allocation *out);
CUresult memory_new_in_pool(CUcontext context, size_t bytes, CUmemoryPool pool, enum memory_kind kind,
                            struct allocation *out);
CUresult memory_register(CUcontext context, void *base, size_t bytes, unsigned flags);
/* Frees the allocation that begins at `base`, if it is of one of the kinds in the bit mask. */
CUresult memory_drop(uintptr_t base, unsigned kinds);
void memory_drop_context(CUcontext context);
/* Returns a copy, because another thread may free the allocation; false if no allocation contains the address. */
bool memory_find(uintptr_t address, struct allocation *found);
/* Whether the whole range is allocated, in one piece or in adjacent mappings, with this access. */
bool memory_holds(uintptr_t address, size_t bytes, bool write);
CUresult memory_link(const struct allocation *filled);
/* How the device, or the host, may use the mapping that begins at `base`. */
CUresult memory_set_access(uintptr_t base, unsigned who, CUmemAccess_flags flags);
void memory_after_fork(void);

/* ---- cuda_addresses.c ---- */
/* A range for the driver's memory that is not accessible yet, at the wish if that is free; 0 without addresses. */
uintptr_t addresses_take(size_t bytes, size_t alignment, uintptr_t wish);
void addresses_give_back(uintptr_t base, size_t bytes);
/* Whether an address can be the driver's only, although perhaps of memory that has been freed. */
bool addresses_contain(uintptr_t address);
void addresses_after_fork(void);

/* ---- cuda_arena.c ---- */
#define ARENA_MAPS_FROM 65536 /* smaller pieces share a mapping */
int memory_file(const char *name);
/* A piece, readable and writable; 0 without memory. */
uintptr_t arena_take(size_t bytes, uint32_t card, off_t *offset);
void arena_give_back(uintptr_t base, size_t bytes, off_t offset);
/* A range that the caller maps itself: the file, or -1. */
int arena_reserve(size_t bytes, uint32_t card, off_t *offset);
void arena_punch(off_t offset, size_t bytes);
int arena_file(void);
void arena_after_fork(void);

/* ---- ipc_share.c ---- */
/* True if other processes have the piece open: it is freed when they have closed it. */
bool import_outlives(const struct allocation *held);
void ipc_share_after_fork(void);

/* ---- cuda_managed.c ---- */
void managed_after_fork(void);

/* ---- cuda_ipc.c ---- */
void ipc_after_fork(void);

/* ---- cuda_vmm_handle.c, cuda_vmm.c ---- */
void vmm_handles_after_fork(void);
void mappings_after_fork(void);

/* ---- cuda_array.c ---- */
struct CUarray_st {
    struct object object;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    uintptr_t base;
    size_t row_bytes;
    bool level; /* of a mipmapped array, which owns the memory */
};
struct array_view {
    uintptr_t base;
    size_t row_bytes, rows, slices;
};
CUresult array_side(CUarray handle, struct array_view *view);

/* ---- cuda_memcpy3d.c ---- */
CUresult box_copy(const CUDA_MEMCPY3D *what);
/* After all work before it; or in its turn on the stream. */
CUresult box_copy_now(const CUDA_MEMCPY3D *what);
CUresult box_copy_on(const CUDA_MEMCPY3D *what, CUstream stream);

/* ---- pools.c ---- */
CUmemoryPool pool_of_graphs(CUdevice device);
/* False if the card's memory, or the pool's own limit, would be exceeded. */
bool pool_take(CUmemoryPool pool, uint64_t bytes);
void pool_give_back(CUmemoryPool pool, uint64_t bytes);
/* Returns to the cards what pools need not keep. */
void pools_settle(void);
/* The process's last context on the card has ended: pools keep nothing there. */
void pools_card_left(uint32_t card);
void pools_after_fork(void);

/* ---- cuda_module.c ---- */
/* The context ends: frees its modules' memory and, with the last context on the card, that of libraries. */
void modules_drop(CUcontext context, bool last_on_card);
void modules_after_fork(void);
struct image_function;
struct CUfunc_st {
    struct object object;
    CUmodule module;
    const struct image_function *arguments; /* NULL = the layout is not known */
    uint64_t duration_ns;
    int attributes[32];
    char name[256];
    struct CUfunc_st *sibling;
};
CUresult function_resolve(const void *handle, struct CUfunc_st **function);
#endif
