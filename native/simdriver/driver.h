/* What the parts of the simulated CUDA driver know of each other. */
#ifndef FENKA_SIMULATED_DRIVER_H
#define FENKA_SIMULATED_DRIVER_H
#include "driver_header.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "node.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        CUresult tried_ = (call);                                                                  \
        if (tried_ != CUDA_SUCCESS)                                                                \
            return tried_;                                                                         \
    } while (0)

/* ---- cuda_init.c: the process and the devices it sees ---- */
extern int device_count;
/* Ordinal -> index of the card in the node, in the order of CUDA_VISIBLE_DEVICES. */
extern uint32_t device_cards[FENKA_NODE_CARDS];
/* Not initialised, or the card server has gone: the error to answer with. */
CUresult driver_ready(void);
CUresult device_card(CUdevice device, uint32_t *card);
/* CUDA_ERROR_UNKNOWN where the card has fallen off the bus, which CUDA knows no better name for. */
static inline CUresult card_ready(uint32_t card)
{
    return node_card_lost(card) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
uint32_t environment_number(const char *name, uint32_t otherwise);
/* cuda_visible.c */
int visible_cards(const char *wish, const struct fenka_node *node, uint32_t *cards);

/* ---- objects.c: handles ---- */
enum object_kind { STREAM = 1, EVENT, MODULE, FUNCTION, POOL, OBJECT_KINDS };
struct object {
    uint32_t kind; /* 0 = deleted */
    uint32_t life; /* of the context when this was made */
    CUcontext context;
    struct object *next;
};
/* Zeroed. A deleted object's memory serves its own kind again and is never given back, so that a
 * stale handle is recognised and not followed into the void. */
void *object_new(enum object_kind kind, size_t bytes, CUcontext context);
void object_delete(void *object);
/* NULL where the handle is not a live object of that kind or its context is gone. */
void *object_get(const void *handle, enum object_kind kind);
void objects_after_fork(void);

/* ---- cuda_context.c ---- */
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
    uint64_t end_ns; /* when all that was given to it is done */
    unsigned host_functions; /* asked for and not yet called */
    size_t limits[CONTEXT_LIMITS];
    struct CUctx_st *next;
};
CUresult context_current(CUcontext *context);
bool context_valid(CUcontext context);
void contexts_after_fork(void);
static inline void raise_to(uint64_t *at, uint64_t value)
{
    uint64_t seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELEASE,
                                                        __ATOMIC_RELAXED))
        ;
}

/* ---- cuda_stream.c ---- */
struct CUstream_st {
    struct object object;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t end_ns;
};
/* NULL, legacy and per-thread handles mean the current context's own line: *stream is NULL. */
CUresult stream_resolve(CUstream handle, CUcontext *context, CUstream *stream);
uint64_t stream_end(CUcontext context, CUstream stream);
void stream_extend(CUcontext context, CUstream stream, uint64_t end_ns);

/* Sleeps until all that was given to the stream, or to the context, is done. */
void stream_wait(CUcontext context, CUstream stream);
bool stream_done(CUcontext context, CUstream stream);

/* ---- cuda_host_function.c ---- */
void host_functions_wait(CUcontext context);
void host_functions_after_fork(void);

/* ---- cuda_memory.c ---- */
enum memory_kind { MEMORY_DEVICE, MEMORY_MANAGED, MEMORY_HOST, MEMORY_REGISTERED };
struct allocation {
    uintptr_t base;
    size_t size;    /* as asked for */
    size_t charged; /* to the card; 0 for host memory */
    size_t mapped;  /* 0 = from malloc */
    enum memory_kind kind;
    unsigned flags;
    uint64_t id;
    CUcontext context;
    uint32_t card;
    CUdevice device;
    CUmemoryPool pool;
    struct allocation *previous, *next;
};
CUresult memory_new(CUcontext context, enum memory_kind kind, size_t bytes, unsigned flags,
                    struct allocation *out);
CUresult memory_new_in_pool(CUcontext context, size_t bytes, CUmemoryPool pool,
                            struct allocation *out);
CUresult memory_register(CUcontext context, void *base, size_t bytes, unsigned flags);
/* Drops what begins at `base`, if it is of one of the kinds in the bit mask. */
CUresult memory_drop(uintptr_t base, unsigned kinds);
void memory_drop_context(CUcontext context);
/* A copy, because another thread may free it; false where no allocation holds the address. */
bool memory_find(uintptr_t address, struct allocation *found);
bool memory_holds(uintptr_t address, size_t bytes);
void memory_after_fork(void);

/* ---- cuda_pool.c ---- */
void pool_account(CUmemoryPool pool, int64_t bytes);

/* ---- cuda_module.c ---- */
struct CUfunc_st {
    struct object object;
    CUmodule module;
    uint64_t duration_ns;
    int attributes[32];
    char name[256];
    struct CUfunc_st *sibling;
};
CUresult function_resolve(const void *handle, struct CUfunc_st **function);
#endif
