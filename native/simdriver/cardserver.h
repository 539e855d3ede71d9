/* What the card server's parts know of each other. */
#ifndef FENKA_CARDSERVER_H
#define FENKA_CARDSERVER_H
#include <sys/types.h>

#include "node.h"

#define SOCKET_NAME "server.sock"
#define MAX_CLIENTS 65536
#define NO_SLOT UINT32_MAX

/* ---- cardserver_state.c: the node's state file, and the slots of processes ---- */
extern struct fenka_node *state;
__attribute__((noreturn, format(printf, 1, 2))) void fail(const char *sentence, ...);
/* Enters the node's directory, locks its state file and maps it. */
void open_state(const char *directory);
/* A server that starts has no clients. A start is a reboot: of provoked faults only the aggregate counters stay. */
void reset_state(void);
/* NO_SLOT if none is free. */
uint32_t take_slot(int32_t pid, uint64_t *generation);
void empty_slot(uint32_t slot);
/* The slot without process, node_slot: for memory that outlives its process, and for the locks of time lines. False if
 * there is none. */
bool take_own_slot(void);
/* Remembers the time that the process in the slot has had. It has ended. */
void remember_time(uint32_t slot);
/* Ends a card's loss, and resets its volatile error counters. */
void recover(struct fenka_node_faults *faults);

/* ---- cardserver_clients.c: connections ---- */
struct client {
    uint32_t slot; /* or NO_SLOT */
    int process;   /* a pidfd of the process with the slot; -1 = none, or it has ended */
    char hello;    /* NODE_HELLO_…; 0 = nothing yet, or no client */
    int file;      /* that the client shares or keeps; -1 = none */
    int32_t pid;   /* of a client that shares or keeps */
    _Alignas(struct node_keep) uint8_t token[NODE_TOKEN]; /* the file's name; or what is kept */
};
extern unsigned client_count;
/* By descriptor. */
struct client *client_of(int fd);
void client_add(int fd);
void client_remove(int fd);
/* The highest descriptor that a client ever had. */
int clients_end(void);
/* The file that is shared under this name; -1 = none. */
int shared_file(const uint8_t *token);
int32_t peer_pid(int fd);
/* A descriptor that becomes readable when the client's process ends; -1 if it cannot be opened. */
int peer_process(int fd);
/* Breaking a card is allowed to the node's owner and to root. */
bool peer_may_provoke(int fd);
/* One byte, and the descriptor that came with it or -1. */
ssize_t receive(int fd, char *byte, int *file);
/* `file`: passed along; -1 = none. */
bool answer(int fd, const struct node_welcome *welcome, int file);
/* Sends an event of NVML to every event set. */
void report_event(uint64_t type, uint32_t card, uint64_t data);

/* ---- cardserver_orphans.c: memory that outlives its process ---- */
/* Takes over the file of a client whose process ends, if others hold any of its memory. */
void orphan_file(struct client *client);
/* The same for all files of the process. */
void orphan_files_of(int32_t pid);
/* Charges orphans with what is still held of them. */
void poll_orphans(void);
bool has_orphans(void);

/* ---- cardserver_faults.c ---- */
/* Returns an errno, or 0. */
int provoke(const struct node_command *command);

/* ---- cardserver_mig.c ---- */
struct node_answer mig_run(const struct node_command *command);
/* What a reset of the card does: instances end, and a pending mode becomes the current one. Returns an errno, or 0. */
int mig_reset(uint32_t card);
/* A reboot resets all cards; some models lose the mode, too. */
void mig_boot(void);

/* ---- cardserver_tree.c ---- */
/* Brings the capability files of a card up to date. */
void tree_update(uint32_t card);
#endif
