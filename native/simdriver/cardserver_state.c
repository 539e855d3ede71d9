/* The node's state file and its slots. The lock is on the state file itself: a program that replaces the file must hold
 * it, too. */
#define _GNU_SOURCE
#include "cardserver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "timeline.h"

struct fenka_node *state;

void fail(const char *sentence, ...) {
    __builtin_va_list arguments;
    __builtin_va_start(arguments, sentence);
    fputs("fenka-cardserver: ", stderr);
    vfprintf(stderr, sentence, arguments);
    fputc('\n', stderr);
    __builtin_va_end(arguments);
    exit(1);
}

static bool someone_answers(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET_NAME};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool answered = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return answered;
}

/* A server that was killed may hold the lock for a moment longer than its socket. */
static bool lock_unless_served(int file) {
    for (int patience_ms = 1000; flock(file, LOCK_EX | LOCK_NB) != 0; patience_ms -= 10) {
        if (patience_ms == 0 || someone_answers())
            return false;
        usleep(10000);
    }
    return true;
}

static int lock_state(const char *directory) {
    for (;;) {
        int file = open("state", O_RDWR | O_CLOEXEC);
        struct stat locked, current;
        if (file < 0)
            fail("%s is not a simulated node: cannot open its file `state`: %s.", directory, strerror(errno));
        if (!lock_unless_served(file))
            fail("another card server already serves %s.", directory);
        if (fstat(file, &locked) == 0 && stat("state", &current) == 0 && locked.st_ino == current.st_ino)
            return file;
        close(file); /* replaced between open and lock */
    }
}

void open_state(const char *directory) {
    if (chdir(directory) != 0)
        fail("cannot enter the node directory %s: %s.", directory, strerror(errno));
    int file = lock_state(directory);
    struct stat found;
    if (fstat(file, &found) != 0 || (uint64_t)found.st_size < sizeof *state)
        fail("the file `state` in %s is too short.", directory);
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (state == MAP_FAILED)
        fail("cannot map the file `state` in %s: %s.", directory, strerror(errno));
    if (state->magic != FENKA_NODE_MAGIC || state->version != FENKA_NODE_VERSION)
        fail("the file `state` in %s was written by another version of fenka.", directory);
}

bool take_own_slot(void) {
    if (node_owns_slot())
        return true;
    node_state = state;
    node_slot = take_slot(0, &node_generation);
    if (node_slot == NO_SLOT)
        node_generation = 0;
    return node_slot != NO_SLOT;
}

/* What it has launched and is not done dies with it. */
void remember_time(uint32_t slot) {
    struct fenka_node_process *process = &state->processes[slot];
    __atomic_store_n(&process->ended, 1, __ATOMIC_RELEASE);
    for (uint32_t card = 0; card < state->card_count; card++) {
        if (!state->lines[card][slot].given || !take_own_slot())
            continue;
        timeline_settle(card, slot);
        struct fenka_node_past *past = &state->past[state->past_count % FENKA_NODE_PAST];
        __atomic_store_n(&past->generation, 0, __ATOMIC_SEQ_CST);
        past->ended_ns = node_now();
        past->busy_ns = timeline_process_total(card, slot);
        past->last_second_ns = timeline_process_busy(card, slot);
        past->pid = process->pid;
        past->card = card;
        past->slot = slot;
        __atomic_store_n(&past->generation, process->generation, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&state->past_count, 1, __ATOMIC_SEQ_CST);
    }
}

void recover(struct fenka_node_faults *faults) {
    memset(faults->ecc_volatile, 0, sizeof faults->ecc_volatile);
    __atomic_store_n(&faults->lost, 0, __ATOMIC_RELEASE);
}

void empty_slot(uint32_t slot) {
    struct fenka_node_process *process = &state->processes[slot];
    __atomic_store_n(&process->generation, 0, __ATOMIC_SEQ_CST);
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++) {
        __atomic_store_n(&state->memory[card][slot], 0, __ATOMIC_SEQ_CST);
        process->contexts[card] = 0;
        process->instances[card] = 0;
        process->busy_ns[card] = 0;
        if (card < state->card_count)
            memset(state->busy[card][slot], 0, sizeof state->busy[card][slot]);
        struct fenka_node_line *line = &state->lines[card][slot];
        if (line->given || line->served || line->turns)
            line->given = line->served = line->turns = 0;
    }
    process->pid = 0;
    process->ended = 0;
}

void reset_state(void) {
    uint32_t used = state->slots_used;
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++)
        empty_slot(slot);
    __atomic_store_n(&state->slots_used, 0, __ATOMIC_RELEASE);
    memset(state->past, 0, sizeof state->past);
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++) {
        /* Most were never used, and are holes of the file until something is written to them. */
        for (uint32_t mark = 0; mark < FENKA_NODE_LANES; mark++) {
            struct fenka_node_lane *lane = &state->lanes[card][mark];
            if (lane->clock_ns || lane->lock || lane->turn_left_ns)
                lane->clock_ns = lane->lock = lane->turn_left_ns = 0;
        }
        recover(&state->faults[card]);
        state->faults[card].hot = 0;
    }
}

uint32_t take_slot(int32_t pid, uint64_t *generation) {
    uint32_t slot = 0;
    while (slot < FENKA_NODE_SLOTS && state->processes[slot].generation != 0)
        slot++;
    if (slot == FENKA_NODE_SLOTS)
        return NO_SLOT;
    /* A client that lost this slot a moment ago may have written once more after it was emptied. */
    empty_slot(slot);
    *generation = ++state->generations;
    state->processes[slot].pid = pid;
    __atomic_store_n(&state->processes[slot].generation, *generation, __ATOMIC_SEQ_CST);
    if (slot >= state->slots_used)
        __atomic_store_n(&state->slots_used, slot + 1, __ATOMIC_RELEASE);
    return slot;
}
