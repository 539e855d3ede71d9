#define _GNU_SOURCE
#include "node.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_WITHIN_S 5
#define RESTARTED_WITHIN_S 15
#define CHECK_EVERY_NS 10000000
/* In a container each library is mounted alone at a system path, without the node's directory. */
#define NODE_IN_CONTAINER "/run/fenka/simulated"
#define NODE_IN_LEASE "/run/fenka/driver/node"

struct fenka_node *node_state;
uint32_t node_slot;
uint64_t node_generation;

static int line = -1;
static ino_t line_inode;
static uint64_t checked_ns;
static bool lost;

uint64_t node_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The descriptor's number may have been reused: a program may close descriptors that it did not open. */
static bool line_is_ours(void) {
    struct stat found;
    return line >= 0 && fstat(line, &found) == 0 && found.st_ino == line_inode;
}

static void forget(void) {
    line = -1;
    node_state = NULL;
    node_generation = 0;
}

void node_detach(void) {
    if (line_is_ours())
        close(line);
    forget();
}

void node_forget(void) {
    forget();
    lost = false;
}

/* The last mapping is kept and reused while the file is the same: other threads may still read it, and a program
 * may attach and detach every second for weeks. */
static struct fenka_node *map_state(int directory) {
    static struct fenka_node *mapped;
    static dev_t device;
    static ino_t inode;
    int file = openat(directory, "state", O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    struct stat found;
    struct fenka_node *state = MAP_FAILED;
    if (fstat(file, &found) == 0 && (uint64_t)found.st_size >= sizeof *state) {
        if (mapped && found.st_dev == device && found.st_ino == inode) {
            close(file);
            return mapped;
        }
        state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (state == MAP_FAILED)
        return NULL;
    if (state->magic != FENKA_NODE_MAGIC || state->version != FENKA_NODE_VERSION) {
        munmap(state, sizeof *state);
        return NULL;
    }
    mapped = state;
    device = found.st_dev;
    inode = found.st_ino;
    return state;
}

/* Two components up from the path that this library was loaded by. The link is not resolved, because it points out
 * of the node to where the library is installed. */
static int open_own_directory(void) {
    Dl_info self;
    if (!dladdr((void *)(uintptr_t)node_attach, &self) || !self.dli_fname)
        return -1;
    char path[4096];
    if (snprintf(path, sizeof path, "%s", self.dli_fname) >= (int)sizeof path)
        return -1;
    for (int component = 0; component < 2; component++) {
        char *slash = strrchr(path, '/');
        if (!slash)
            return -1;
        *(slash == path ? slash + 1 : slash) = '\0';
    }
    return open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* Takes ownership of the descriptor; -1 if the directory is not a node. */
static int if_node(int directory, struct fenka_node **state) {
    if (directory >= 0 && !(*state = map_state(directory))) {
        close(directory);
        directory = -1;
    }
    return directory;
}

static int open_node(const char *path, struct fenka_node **state) {
    return path ? if_node(open(path, O_PATH | O_DIRECTORY | O_CLOEXEC), state) : -1;
}

/* contained: set if the node was found at its path in a container. */
static int open_directory(struct fenka_node **state, bool *contained) {
    int directory = if_node(open_own_directory(), state);
    if (directory < 0)
        directory = open_node(NODE_IN_LEASE, state);
    if (directory < 0)
        directory = open_node(getenv("FENKA_SIMULATED_NODE"), state);
    *contained = directory < 0;
    return *contained ? open_node(NODE_IN_CONTAINER, state) : directory;
}

static int call_server(int directory) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct timeval patience = {.tv_sec = ANSWER_WITHIN_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    /* Through the descriptor, because a socket's address holds 108 bytes and a path may be longer. */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/server.sock", directory);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

static int greet(int fd, char hello, struct node_welcome *welcome) {
    if (send(fd, &hello, 1, MSG_NOSIGNAL) != 1)
        return errno;
    ssize_t got = recv(fd, welcome, sizeof *welcome, MSG_WAITALL);
    if (got != (ssize_t)sizeof *welcome)
        return got < 0 ? errno : ECONNRESET;
    return welcome->ok ? 0 : EUSERS;
}

/* contained: set if the server runs in its own container, which is restarted when it ends. */
static int attach(char hello, bool *contained) {
    struct fenka_node *state = NULL;
    int directory = open_directory(&state, contained);
    if (directory < 0)
        return ENOENT;
    struct node_welcome welcome;
    struct stat found;
    int fd = call_server(directory);
    int why = fd < 0 ? errno : greet(fd, hello, &welcome);
    if (why == 0 && fstat(fd, &found) != 0)
        why = errno;
    close(directory);
    if (why != 0) {
        if (fd >= 0)
            close(fd);
        return why == ENOENT ? ECONNREFUSED : why;
    }
    line = fd;
    line_inode = found.st_ino;
    node_slot = welcome.slot;
    node_generation = welcome.generation;
    lost = false;
    checked_ns = node_now();
    __atomic_store_n(&node_state, state, __ATOMIC_RELEASE);
    return 0;
}

/* The card server may be restarting while a container starts, so the container waits for it. */
int node_attach(char hello) {
    const struct timespec pause = {.tv_nsec = 50000000};
    uint64_t until = node_now() + RESTARTED_WITHIN_S * 1000000000ULL;
    bool contained = false;
    int why = attach(hello, &contained);
    while ((why == ECONNREFUSED || why == ECONNRESET) && contained && node_now() < until) {
        nanosleep(&pause, NULL);
        why = attach(hello, &contained);
    }
    return why;
}

uint32_t node_cuda_version(void) {
    bool contained;
    struct fenka_node *state = node_state;
    int directory = state ? -1 : open_directory(&state, &contained);
    if (directory >= 0)
        close(directory);
    return state ? state->cuda_version : 0;
}

/* A second connection, because the process's own must stay silent. */
static int call_again(void) {
    bool contained;
    struct fenka_node *state = NULL;
    int directory = open_directory(&state, &contained);
    if (directory < 0)
        return -1;
    int fd = call_server(directory);
    close(directory);
    return fd;
}

union descriptor_message {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr header;
};

static int hand_over(char hello, const void *what, int file) {
    uint8_t said[1 + NODE_TOKEN] = {(uint8_t)hello};
    union descriptor_message beside = {
        .header = {.cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&beside.header), &file, sizeof file);
    struct iovec text = {said, sizeof said};
    struct msghdr message = {
        .msg_iov = &text, .msg_iovlen = 1, .msg_control = beside.bytes, .msg_controllen = sizeof beside.bytes};
    struct node_welcome welcome = {.ok = 0};
    memcpy(said + 1, what, NODE_TOKEN);
    int fd = call_again();
    if (fd >= 0 && sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof said &&
        recv(fd, &welcome, sizeof welcome, MSG_WAITALL) == (ssize_t)sizeof welcome && welcome.ok)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

int node_share(int file, uint8_t *token) {
    if (syscall(SYS_getrandom, token, NODE_TOKEN, 0) != NODE_TOKEN)
        return -1;
    return hand_over(NODE_HELLO_SHARE, token, file);
}

int node_keep(int file, uint32_t card, uint64_t bytes) {
    struct node_keep keep = {card, 0, bytes};
    return hand_over(NODE_HELLO_KEEP, &keep, file);
}

int node_open_shared(const uint8_t *token) {
    uint8_t said[1 + NODE_TOKEN] = {NODE_HELLO_FETCH};
    struct node_welcome welcome = {.ok = 0};
    union descriptor_message beside;
    struct iovec text = {&welcome, sizeof welcome};
    struct msghdr message = {
        .msg_iov = &text, .msg_iovlen = 1, .msg_control = beside.bytes, .msg_controllen = sizeof beside.bytes};
    memcpy(said + 1, token, NODE_TOKEN);
    int fd = call_again(), file = -1;
    if (fd < 0)
        return -1;
    if (send(fd, said, sizeof said, MSG_NOSIGNAL) == (ssize_t)sizeof said &&
        recvmsg(fd, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) == (ssize_t)sizeof welcome && welcome.ok &&
        CMSG_FIRSTHDR(&message))
        memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
    close(fd);
    return file;
}

int node_call(char hello) {
    struct node_welcome welcome;
    int fd = call_again();
    if (fd >= 0 && greet(fd, hello, &welcome) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

bool node_run(const struct node_command *command, struct node_answer *answer) {
    int fd = node_call(NODE_HELLO_COMMAND);
    bool answered = fd >= 0 && send(fd, command, sizeof *command, MSG_NOSIGNAL) == (ssize_t)sizeof *command &&
                    recv(fd, answer, sizeof *answer, MSG_WAITALL) == (ssize_t)sizeof *answer;
    if (fd >= 0)
        close(fd);
    return answered;
}

bool node_card_lost(uint32_t card) { return __atomic_load_n(&node_state->faults[card].lost, __ATOMIC_ACQUIRE) != 0; }

bool node_alive(void) {
    if (lost || !node_state)
        return false;
    uint64_t now = node_now();
    if (now - __atomic_load_n(&checked_ns, __ATOMIC_RELAXED) < CHECK_EVERY_NS)
        return true;
    __atomic_store_n(&checked_ns, now, __ATOMIC_RELAXED);
    char byte;
    bool silent = line_is_ours() && recv(line, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
                  (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (!silent)
        lost = true;
    return silent;
}

bool node_owns_slot(void) {
    return node_state && node_generation != 0 &&
           __atomic_load_n(&node_state->processes[node_slot].generation, __ATOMIC_ACQUIRE) == node_generation;
}
