/* The server's clients, by descriptor, and the messages that carry descriptors. */
#define _GNU_SOURCE
#include "cardserver.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIDFD_OPEN 434 /* SYS_pidfd_open, which old headers lack */

static struct client clients[MAX_CLIENTS];
static int highest;
unsigned client_count;

struct client *client_of(int fd) { return &clients[fd]; }

int clients_end(void) { return highest + 1; }

void client_add(int fd) {
    clients[fd] = (struct client){.slot = NO_SLOT, .process = -1, .file = -1};
    highest = fd > highest ? fd : highest;
    client_count++;
}

void client_remove(int fd) {
    if (clients[fd].file >= 0)
        close(clients[fd].file);
    if (clients[fd].process >= 0)
        close(clients[fd].process);
    clients[fd] = (struct client){.slot = NO_SLOT, .process = -1, .file = -1};
    close(fd);
    client_count--;
}

int shared_file(const uint8_t *token) {
    for (int fd = 0; fd <= highest; fd++)
        if (clients[fd].file >= 0 && clients[fd].hello == NODE_HELLO_SHARE &&
            memcmp(clients[fd].token, token, NODE_TOKEN) == 0)
            return clients[fd].file;
    return -1;
}

static struct ucred peer_of(int fd) {
    struct ucred peer = {.pid = 0, .uid = (uid_t)-1};
    socklen_t size = sizeof peer;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return peer;
}

int32_t peer_pid(int fd) { return peer_of(fd).pid; }

int peer_process(int fd) { return (int)syscall(PIDFD_OPEN, peer_pid(fd), 0); }

bool peer_may_provoke(int fd) {
    uid_t uid = peer_of(fd).uid;
    return uid == 0 || uid == geteuid();
}

union descriptor_message {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr header;
};

ssize_t receive(int fd, char *byte, int *file) {
    union descriptor_message beside;
    struct iovec text = {byte, 1};
    struct msghdr message = {
        .msg_iov = &text, .msg_iovlen = 1, .msg_control = beside.bytes, .msg_controllen = sizeof beside.bytes};
    ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *first = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    *file = -1;
    if (first && first->cmsg_type == SCM_RIGHTS)
        memcpy(file, CMSG_DATA(first), sizeof *file);
    return got;
}

bool answer(int fd, const struct node_welcome *welcome, int file) {
    union descriptor_message beside = {
        .header = {.cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&beside.header), &file, sizeof file);
    struct iovec text = {(void *)(uintptr_t)welcome, sizeof *welcome};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};
    if (file >= 0) {
        message.msg_control = beside.bytes;
        message.msg_controllen = sizeof beside.bytes;
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof *welcome;
}

/* A listener that does not read loses events beyond the capacity of its queue. */
void report_event(uint64_t type, uint32_t card, uint64_t data) {
    struct node_event event = {state->event_count + 1, type, data, card, 0};
    __atomic_store_n(&state->event_count, event.number, __ATOMIC_RELEASE);
    for (int fd = 0; fd < clients_end(); fd++)
        if (client_of(fd)->hello == NODE_HELLO_EVENTS)
            send(fd, &event, sizeof event, MSG_NOSIGNAL | MSG_DONTWAIT);
}
