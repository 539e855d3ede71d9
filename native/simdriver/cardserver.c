/* fenka-cardserver NODE [--idle-seconds N]: tracks which processes use a simulated node's cards.
 *
 * A process holds its slot while its connection is open; the kernel closes that when the process dies.
 * The PID comes from the kernel (SO_PEERCRED), as seen from the server's PID namespace, like the host's
 * PIDs that a real driver reports. */
#define _GNU_SOURCE
#include "cardserver.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define ORPHANS_MS 10

static int events, listener, signals;

/* Marks events of the process of a client. */
#define OF_PROCESS ((uint64_t)1 << 32)

static void watch(int fd, uint64_t name) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = name};
    if (epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) != 0)
        fail("cannot watch a connection: %s.", strerror(errno));
}

static void add_to_epoll(int fd) { watch(fd, (uint64_t)fd); }

static void listen_for_clients(const char *directory) {
    unlink(SOCKET_NAME);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET_NAME};
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(SOCKET_NAME, 0666) != 0 || listen(listener, SOMAXCONN) != 0)
        fail("cannot listen on %s/%s: %s.", directory, SOCKET_NAME, strerror(errno));
    add_to_epoll(listener);
}

static void accept_clients(void) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_CLIENTS) {
            close(fd);
            continue;
        }
        client_add(fd);
        add_to_epoll(fd);
    }
}

/* Before the slot is emptied its files become orphans: what others hold is charged at every instant. */
static void hang_up(int fd) {
    struct client *client = client_of(fd);
    if (client->slot != NO_SLOT) {
        orphan_files_of(peer_pid(fd));
        remember_time(client->slot);
        empty_slot(client->slot);
    }
    if (client->file >= 0)
        orphan_file(client);
    client_remove(fd);
}

static bool enter(int fd, struct node_welcome *welcome) {
    struct client *client = client_of(fd);
    client->slot = welcome->slot = take_slot(peer_pid(fd), &welcome->generation);
    if (client->slot == NO_SLOT)
        return false;
    client->process = peer_process(fd);
    if (client->process >= 0)
        watch(client->process, OF_PROCESS | (uint64_t)fd);
    return true;
}

/* The connection is still open where children have inherited it. The descriptor of the client that the event was for may
 * have been reused since. */
static void note_end(int fd) {
    struct client *client = client_of(fd);
    struct pollfd process = {.fd = client->process, .events = POLLIN};
    if (client->process < 0 || poll(&process, 1, 0) != 1)
        return;
    __atomic_store_n(&state->processes[client->slot].ended, 1, __ATOMIC_RELEASE);
    close(client->process);
    client->process = -1;
}

/* Stores a file that the client shares or keeps, or passes a shared one to the client. */
static bool exchange(int fd, char hello, int given, struct node_welcome *welcome) {
    _Alignas(struct node_keep) uint8_t token[NODE_TOKEN];
    struct client *client = client_of(fd);
    bool whole = recv(fd, token, sizeof token, 0) == (ssize_t)sizeof token;
    if (hello == NODE_HELLO_FETCH) {
        int file = whole ? shared_file(token) : -1;
        welcome->ok = file >= 0;
        return answer(fd, welcome, file);
    }
    bool fits = hello == NODE_HELLO_KEEP ? ((struct node_keep *)(void *)token)->card < state->card_count
                                         : shared_file(token) < 0;
    welcome->ok = whole && given >= 0 && client->file < 0 && fits;
    if (!welcome->ok)
        return false;
    client->file = given;
    client->pid = peer_pid(fd);
    memcpy(client->token, token, sizeof token);
    return answer(fd, welcome, -1);
}

static void run_command(int fd) {
    struct node_command command;
    ssize_t got = recv(fd, &command, sizeof command, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != (ssize_t)sizeof command) {
        hang_up(fd);
        return;
    }
    struct node_answer answer = {.error = EPERM};
    if (peer_may_provoke(fd) && command.act >= FENKA_NODE_MIG_PENDING)
        answer = mig_run(&command);
    else if (peer_may_provoke(fd))
        answer.error = provoke(&command);
    if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != (ssize_t)sizeof answer)
        hang_up(fd);
}

static void handle_message(int fd) {
    struct client *client = client_of(fd);
    if (client->hello == NODE_HELLO_COMMAND) {
        run_command(fd);
        return;
    }
    char hello;
    int given;
    ssize_t got = receive(fd, &hello, &given);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    bool fits = got == 1 && client->slot == NO_SLOT && client->file < 0 && client->hello != NODE_HELLO_EVENTS;
    if (fits)
        client->hello = hello;
    struct node_welcome welcome = {.ok = 1};
    if (fits && (hello == NODE_HELLO_SHARE || hello == NODE_HELLO_FETCH || hello == NODE_HELLO_KEEP)) {
        fits = exchange(fd, hello, given, &welcome);
    } else if (fits) {
        if (hello == NODE_HELLO_CUDA)
            welcome.ok = enter(fd, &welcome);
        fits = answer(fd, &welcome, -1);
    }
    if (given >= 0 && given != client->file)
        close(given);
    if (!fits)
        hang_up(fd);
}

static void watch_signals(void) {
    sigset_t ending;
    sigemptyset(&ending);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGINT);
    sigprocmask(SIG_BLOCK, &ending, NULL);
    signals = signalfd(-1, &ending, SFD_CLOEXEC);
    add_to_epoll(signals);
}

/* The process that started the server waits for this line, or for the end of its standard output. */
static void say_ready(void) {
    puts("ready");
    fflush(stdout);
    int null_device = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; null_device >= 0 && fd < 3; fd++)
        dup2(null_device, fd);
}

static void serve(int idle_ms) {
    struct epoll_event ready[64];
    for (;;) {
        int timeout = has_orphans() ? ORPHANS_MS : client_count == 0 ? idle_ms : -1;
        int count = epoll_wait(events, ready, 64, timeout);
        bool polled = has_orphans();
        poll_orphans();
        if (count == 0 && !polled)
            return;
        for (int i = 0; i < count; i++) {
            int fd = (int)(ready[i].data.u64 & INT32_MAX);
            if (ready[i].data.u64 & OF_PROCESS)
                note_end(fd);
            else if (fd == signals)
                return;
            else if (fd == listener)
                accept_clients();
            else
                handle_message(fd);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 2 && !(argc == 4 && strcmp(argv[2], "--idle-seconds") == 0))
        fail("usage: fenka-cardserver NODE [--idle-seconds N]   (0 = never exit)");
    const char *directory = argv[1];
    int idle_ms = argc == 4 ? atoi(argv[3]) * 1000 : 30000;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    open_state(directory);
    events = epoll_create1(EPOLL_CLOEXEC);
    reset_state();
    mig_boot();
    watch_signals();
    listen_for_clients(directory);
    say_ready();
    serve(idle_ms > 0 ? idle_ms : -1);
    unlink(SOCKET_NAME);
    return 0;
}
