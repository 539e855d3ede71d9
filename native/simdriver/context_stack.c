/* Each thread's stack of current contexts. */
#include "driver.h"

#define STACK_DEPTH 64

static __thread CUcontext stack[STACK_DEPTH];
static __thread int depth;

bool context_valid(CUcontext context) {
    return context && (uintptr_t)context % _Alignof(struct CUctx_st) == 0 && context->magic == CONTEXT_MAGIC &&
           context->alive;
}

CUresult context_current(CUcontext *context) {
    TRY(driver_ready());
    if (depth == 0 || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[depth - 1];
    TRY(card_ready((*context)->card));
    return (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUcontext context_top(void) { return depth > 0 ? stack[depth - 1] : NULL; }

bool context_stack_full(void) { return depth == STACK_DEPTH; }

void context_push(CUcontext context) { stack[depth++] = context; }

bool context_pop(CUcontext *context) {
    if (depth == 0)
        return false;
    *context = stack[--depth];
    return true;
}

void context_set_top(CUcontext context) {
    depth += depth == 0;
    stack[depth - 1] = context;
}

void context_stack_after_fork(void) { depth = 0; }
