/* A process's tie to the simulated node: its directory, its shared memory, its line to the server. */
#ifndef FENKA_SIMULATED_NODE_H
#define FENKA_SIMULATED_NODE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* What a client says first; the server answers with a node_welcome. */
#define NODE_HELLO_CUDA 'C' /* wants a slot */
#define NODE_HELLO_NVML 'N' /* reads only */
/* Both followed by a token; with the first comes a descriptor, which the server keeps while the
 * connection is open and gives to those who ask for it by the second. */
#define NODE_HELLO_SHARE 'S'
#define NODE_HELLO_FETCH 'F'
#define NODE_TOKEN 16
/* Followed by a node_keep, and a descriptor of memory that others may come to hold: what they still hold
 * when the process has ended stays charged to the card. So does what they have opened of a shared file,
 * on whose pieces they hold locks. */
#define NODE_HELLO_KEEP 'K'
#define NODE_HELLO_EVENTS 'E'  /* is sent a node_event for each event from now on */
#define NODE_HELLO_COMMAND 'X' /* sends one node_command after another, is sent a node_answer to each */

struct node_keep {
    uint32_t card, reserved;
    uint64_t bytes;
};
_Static_assert(sizeof(struct node_keep) == NODE_TOKEN, "both follow a greeting");

/* Where a card's pieces lie in the file of a process's memory. */
#define NODE_CARD_SHIFT 58

struct node_welcome {
    uint32_t ok;
    uint32_t slot;
    uint64_t generation;
};

struct node_event {
    uint64_t number; /* 1, 2, …; as in event_count */
    uint64_t type;   /* NVML's bit */
    uint64_t data;   /* an XID's number; 0 with other events */
    uint32_t card;
    uint32_t reserved;
};

struct node_command {
    uint32_t act; /* FENKA_NODE_TEMPERATURE, … */
    uint32_t card;
    int64_t value;
};

struct node_answer {
    int32_t error; /* an errno: ENODEV = no such card, EOPNOTSUPP = it has no ECC or no MIG, EPERM, EINVAL */
    uint32_t id;   /* of an instance that was created */
};

/* NULL until node_attach succeeded, and again after node_detach and node_forget. */
extern struct fenka_node *node_state;
extern uint32_t node_slot;
extern uint64_t node_generation;

/* 0, or an errno: ENOENT = no node is where this library was loaded from, nor where
 * FENKA_SIMULATED_NODE says, nor at /run/fenka/simulated; anything else = the node's card server does
 * not answer. Not thread-safe: callers hold their own lock. */
int node_attach(char hello);
void node_detach(void);

/* False once the server has ended, permanently: a successor does not know this process. Checks the socket at most every
 * 10 ms. */
bool node_alive(void);

/* False where this process no longer owns its slot; then it must not write to it. */
bool node_owns_slot(void);

/* The version of CUDA that the node's file says, also before node_attach; 0 = there is no node. Not thread-safe. */
uint32_t node_cuda_version(void);

/* For a forked child: the inherited connection is the parent's, and the child must make its own. It stays open: like
 * the real driver, the server frees what the parent holds when nobody has its descriptors any more. */
void node_forget(void);

/* A line that keeps the file shared under a new secret token; or -1. */
int node_share(int file, uint8_t *token);
/* A line that has the server keep account of the file when this process has ended; or -1. */
int node_keep(int file, uint32_t card, uint64_t bytes);
/* A new descriptor of what was shared under the token; or -1. */
int node_open_shared(const uint8_t *token);
/* A greeted connection of the caller's own, or -1. */
int node_call(char hello);

bool node_card_lost(uint32_t card);

/* Sends one command and receives the answer; false if the server does not answer. */
bool node_run(const struct node_command *command, struct node_answer *answer);

uint64_t node_now(void);
#endif
