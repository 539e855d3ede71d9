/* fenka-cardserver NODE [--idle-seconds N]: knows who uses a simulated node's cards.
 *
 * A process holds its slot for as long as it keeps its connection open; the kernel closes that when
 * the process dies, however it dies. The process id is the kernel's word (SO_PEERCRED), as seen from
 * the server's PID namespace, like the host's PIDs that a real driver reports.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "node.h"

#define SOCKET_NAME "server.sock"
#define MAX_CLIENTS 65536
#define NO_SLOT UINT32_MAX
#define ORPHANS_MS 10
/* As nvml.h numbers them, which this program is not compiled with. */
#define EVENT_SINGLE_BIT 1
#define EVENT_DOUBLE_BIT 2
#define EVENT_XID 8
/* What NVIDIA's driver reports beside an uncorrected error, and of a card that left the bus. */
#define XID_DOUBLE_BIT 48
#define XID_LOST 79

static const char *directory;
static struct fenka_node *state;
static int events, listener, signals;
static unsigned clients;
/* By file descriptor: the slot that its client holds, and what it said that it is; 0 = nothing yet. */
static uint32_t slot_of[MAX_CLIENTS];
/* And the file that its client shares, -1 = none, with the name that others ask for it by. */
static int file_of[MAX_CLIENTS];
static uint8_t token_of[MAX_CLIENTS][NODE_TOKEN];
static int32_t pid_of[MAX_CLIENTS]; /* of those who share or keep */
static int highest; /* descriptor of a client, ever */
static char hello_of[MAX_CLIENTS];

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *sentence, ...)
{
    __builtin_va_list arguments;
    __builtin_va_start(arguments, sentence);
    fputs("fenka-cardserver: ", stderr);
    vfprintf(stderr, sentence, arguments);
    fputc('\n', stderr);
    exit(1);
}

static bool someone_answers(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET_NAME};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool answered = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return answered;
}

/* A server that was killed may hold the lock for a moment longer than its socket. */
static bool lock_unless_served(int file)
{
    for (int patience_ms = 1000; flock(file, LOCK_EX | LOCK_NB) != 0; patience_ms -= 10) {
        if (patience_ms == 0 || someone_answers())
            return false;
        usleep(10000);
    }
    return true;
}

/* The lock is on the state file itself: whoever replaces the file must hold it, too. */
static int lock_state(void)
{
    for (;;) {
        int file = open("state", O_RDWR | O_CLOEXEC);
        struct stat locked, current;
        if (file < 0)
            fail("%s is not a simulated node: cannot open its file `state`: %s.", directory,
                 strerror(errno));
        if (!lock_unless_served(file))
            fail("another card server already serves %s.", directory);
        if (fstat(file, &locked) == 0 && stat("state", &current) == 0 &&
            locked.st_ino == current.st_ino)
            return file;
        close(file); /* replaced between open and lock */
    }
}

static void open_state(void)
{
    if (chdir(directory) != 0)
        fail("cannot enter the node directory %s: %s.", directory, strerror(errno));
    int file = lock_state();
    struct stat found;
    if (fstat(file, &found) != 0 || (uint64_t)found.st_size < sizeof *state)
        fail("the file `state` in %s is too short.", directory);
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (state == MAP_FAILED)
        fail("cannot map the file `state` in %s: %s.", directory, strerror(errno));
    if (state->magic != FENKA_NODE_MAGIC || state->version != FENKA_NODE_VERSION)
        fail("the file `state` in %s was written by another version of fenka.", directory);
}

static void empty_slot(uint32_t slot)
{
    struct fenka_node_process *process = &state->processes[slot];
    __atomic_store_n(&process->generation, 0, __ATOMIC_SEQ_CST);
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++) {
        __atomic_store_n(&state->memory[card][slot], 0, __ATOMIC_SEQ_CST);
        process->contexts[card] = 0;
        process->busy_ns[card] = 0;
        if (card < state->card_count)
            memset(state->busy[card][slot], 0, sizeof state->busy[card][slot]);
        struct fenka_node_line *line = &state->lines[card][slot];
        if (line->given || line->served || line->turns)
            line->given = line->served = line->turns = 0;
    }
    process->pid = 0;
}

static void recover(struct fenka_node_faults *faults)
{
    memset(faults->ecc_volatile, 0, sizeof faults->ecc_volatile);
    __atomic_store_n(&faults->lost, 0, __ATOMIC_RELEASE);
}

/* Nobody is connected to a server that just started, whatever its predecessor left; and a start is a
 * reboot: of what was provoked, only the aggregate counters stay. */
static void forget_everyone(void)
{
    uint32_t used = state->slots_used;
    for (uint32_t slot = 0; slot < used && slot < FENKA_NODE_SLOTS; slot++)
        empty_slot(slot);
    __atomic_store_n(&state->slots_used, 0, __ATOMIC_RELEASE);
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++) {
        state->cards[card].clock_ns = state->cards[card].lock = state->cards[card].turn_left_ns = 0;
        recover(&state->faults[card]);
        state->faults[card].hot = 0;
    }
}

static uint32_t take_slot(int32_t pid, uint64_t *generation)
{
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

/* ---- memory that outlives its process ---- */

/* What others hold of the memory of processes that have ended, charged to a slot of nobody's. */
struct orphan {
    int file;
    bool shared; /* pieces of it are, by their locks; else all of it, while any other opening has a lock */
    struct node_keep keep;
    uint64_t held[FENKA_NODE_CARDS];
    struct orphan *next;
};
static struct orphan *orphans;
static uint32_t orphan_slot = NO_SLOT;

#define OFD_GETLK 36

/* Locks are listed in no order. */
static uint64_t locked_between(int file, off_t from, off_t to)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from};
    if (from >= to || fcntl(file, OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK)
        return 0;
    off_t begin = lock.l_start > from ? lock.l_start : from;
    off_t end = lock.l_len && lock.l_start + lock.l_len < to ? lock.l_start + lock.l_len : to;
    return (uint64_t)(end - begin) + locked_between(file, from, begin) + locked_between(file, end, to);
}

static uint64_t held_of(const struct orphan *orphan, uint32_t card)
{
    if (orphan->shared)
        return locked_between(orphan->file, (off_t)card << NODE_CARD_SHIFT,
                              ((off_t)card + 1) << NODE_CARD_SHIFT);
    if (card != orphan->keep.card || flock(orphan->file, LOCK_EX | LOCK_NB) == 0)
        return 0;
    return orphan->keep.bytes;
}

/* Brings the card's account up to what is held; false where that is nothing. */
static bool charge_orphan(struct orphan *orphan)
{
    bool any = false;
    for (uint32_t card = 0; card < state->card_count; card++) {
        uint64_t held = held_of(orphan, card);
        if (held != orphan->held[card])
            __atomic_fetch_add(&state->memory[card][orphan_slot], held - orphan->held[card],
                               __ATOMIC_SEQ_CST);
        orphan->held[card] = held;
        any = any || held > 0;
    }
    return any;
}

static void look_at_orphans(void)
{
    for (struct orphan **place = &orphans, *one; (one = *place);) {
        if (charge_orphan(one)) {
            place = &one->next;
            continue;
        }
        *place = one->next;
        close(one->file);
        free(one);
    }
}

static uint32_t take_slot(int32_t pid, uint64_t *generation);

/* Takes the file over from a connection whose process ends. */
static void orphan(int fd)
{
    uint64_t generation;
    struct orphan *made = calloc(1, sizeof *made);
    if (orphan_slot == NO_SLOT)
        orphan_slot = take_slot(0, &generation);
    if (!made || orphan_slot == NO_SLOT) {
        free(made);
        return;
    }
    made->file = file_of[fd];
    made->shared = hello_of[fd] == NODE_HELLO_SHARE;
    memcpy(&made->keep, token_of[fd], sizeof made->keep);
    file_of[fd] = -1;
    if (charge_orphan(made)) {
        made->next = orphans;
        orphans = made;
    } else {
        close(made->file);
        free(made);
    }
}

static int32_t peer_of(int fd)
{
    struct ucred peer = {.pid = 0};
    socklen_t size = sizeof peer;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return peer.pid;
}

/* Before its slot is emptied: what others hold is on the card at every instant. */
static void orphan_all_of(int32_t pid)
{
    for (int fd = 0; fd <= highest; fd++)
        if (file_of[fd] >= 0 && pid_of[fd] == pid)
            orphan(fd);
}

static void watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd};
    if (epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) != 0)
        fail("cannot watch a connection: %s.", strerror(errno));
}

static void listen_for_clients(void)
{
    unlink(SOCKET_NAME);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET_NAME};
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(SOCKET_NAME, 0666) != 0 || listen(listener, SOMAXCONN) != 0)
        fail("cannot listen on %s/%s: %s.", directory, SOCKET_NAME, strerror(errno));
    watch(listener);
}

static void accept_clients(void)
{
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_CLIENTS) {
            close(fd);
            continue;
        }
        slot_of[fd] = NO_SLOT;
        file_of[fd] = -1;
        hello_of[fd] = 0;
        highest = fd > highest ? fd : highest;
        clients++;
        watch(fd);
    }
}

static void hang_up(int fd)
{
    if (slot_of[fd] != NO_SLOT) {
        orphan_all_of(state->processes[slot_of[fd]].pid);
        empty_slot(slot_of[fd]);
    }
    slot_of[fd] = NO_SLOT;
    if (file_of[fd] >= 0)
        orphan(fd);
    if (file_of[fd] >= 0)
        close(file_of[fd]);
    file_of[fd] = -1;
    hello_of[fd] = 0;
    close(fd);
    clients--;
}

union descriptor_message {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr header;
};

/* One byte, and the descriptor that came with it or -1. */
static ssize_t receive(int fd, char *byte, int *file)
{
    union descriptor_message beside;
    struct iovec text = {byte, 1};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = beside.bytes,
                             .msg_controllen = sizeof beside.bytes};
    ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *first = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    *file = -1;
    if (first && first->cmsg_type == SCM_RIGHTS)
        memcpy(file, CMSG_DATA(first), sizeof *file);
    return got;
}

static int shared_as(const uint8_t *token)
{
    for (int fd = 0; fd <= highest; fd++)
        if (file_of[fd] >= 0 && hello_of[fd] == NODE_HELLO_SHARE && memcmp(token_of[fd], token, NODE_TOKEN) == 0)
            return file_of[fd];
    return -1;
}

static bool answer(int fd, const struct node_welcome *welcome, int file)
{
    union descriptor_message beside = {
        .header = {.cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET,
                   .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&beside.header), &file, sizeof file);
    struct iovec text = {(void *)(uintptr_t)welcome, sizeof *welcome};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};
    if (file >= 0) {
        message.msg_control = beside.bytes;
        message.msg_controllen = sizeof beside.bytes;
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof *welcome;
}

/* Takes the file in, or finds it. The token came in one piece with the first byte. */
static bool exchange(int fd, char hello, int given, struct node_welcome *welcome)
{
    _Alignas(struct node_keep) uint8_t token[NODE_TOKEN];
    bool whole = recv(fd, token, sizeof token, 0) == (ssize_t)sizeof token;
    if (hello == NODE_HELLO_FETCH) {
        int file = whole ? shared_as(token) : -1;
        welcome->ok = file >= 0;
        return answer(fd, welcome, file);
    }
    bool fits = hello == NODE_HELLO_KEEP
                    ? ((struct node_keep *)(void *)token)->card < state->card_count
                    : shared_as(token) < 0;
    welcome->ok = whole && given >= 0 && file_of[fd] < 0 && fits;
    if (!welcome->ok)
        return false;
    file_of[fd] = given;
    pid_of[fd] = peer_of(fd);
    memcpy(token_of[fd], token, sizeof token);
    return answer(fd, welcome, -1);
}

/* A listener that does not read loses what its queue has no room for. */
static void tell(uint64_t type, uint32_t card, uint64_t data)
{
    struct node_event event = {state->event_count + 1, type, data, card, 0};
    __atomic_store_n(&state->event_count, event.number, __ATOMIC_RELEASE);
    for (int fd = 0; fd <= highest; fd++)
        if (hello_of[fd] == NODE_HELLO_EVENTS)
            send(fd, &event, sizeof event, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static int count_ecc(uint32_t card, int kind, int64_t errors)
{
    struct fenka_node_faults *faults = &state->faults[card];
    if (!faults->ecc)
        return EOPNOTSUPP;
    if (errors < 1 || errors > UINT32_MAX)
        return EINVAL;
    __atomic_fetch_add(&faults->ecc_volatile[kind], (uint64_t)errors, __ATOMIC_RELAXED);
    __atomic_fetch_add(&faults->ecc_aggregate[kind], (uint64_t)errors, __ATOMIC_RELAXED);
    tell(kind ? EVENT_DOUBLE_BIT : EVENT_SINGLE_BIT, card, 0);
    if (kind)
        tell(EVENT_XID, card, XID_DOUBLE_BIT);
    return 0;
}

static int set_temperature(struct fenka_node_faults *faults, int64_t celsius)
{
    if (celsius < 0 || celsius > 200)
        return EINVAL;
    faults->temperature_c = (int32_t)celsius;
    __atomic_store_n(&faults->hot, 1, __ATOMIC_RELEASE);
    return 0;
}

static int provoke(const struct node_command *command)
{
    uint32_t card = command->card;
    if (card >= state->card_count)
        return ENODEV;
    struct fenka_node_faults *faults = &state->faults[card];
    switch (command->act) {
    case FENKA_NODE_TEMPERATURE: return set_temperature(faults, command->value);
    case FENKA_NODE_NO_TEMPERATURE: __atomic_store_n(&faults->hot, 0, __ATOMIC_RELEASE); return 0;
    case FENKA_NODE_ECC_CORRECTED: return count_ecc(card, 0, command->value);
    case FENKA_NODE_ECC_UNCORRECTED: return count_ecc(card, 1, command->value);
    case FENKA_NODE_XID:
        if (command->value < 1 || command->value > UINT16_MAX)
            return EINVAL;
        tell(EVENT_XID, card, (uint64_t)command->value);
        return 0;
    case FENKA_NODE_LOSE:
        if (!__atomic_exchange_n(&faults->lost, 1, __ATOMIC_ACQ_REL))
            tell(EVENT_XID, card, XID_LOST);
        return 0;
    case FENKA_NODE_RECOVER:
        if (faults->lost)
            recover(faults);
        return 0;
    default: return EINVAL;
    }
}

/* Breaking a card is for whom the node belongs to, and for root. */
static bool may_provoke(int fd)
{
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t size = sizeof peer;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return peer.uid == 0 || peer.uid == geteuid();
}

static void obey(int fd)
{
    struct node_command command;
    ssize_t got = recv(fd, &command, sizeof command, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != (ssize_t)sizeof command) {
        hang_up(fd);
        return;
    }
    struct node_answer answer = {.error = may_provoke(fd) ? provoke(&command) : EPERM};
    if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != (ssize_t)sizeof answer)
        hang_up(fd);
}

static void hear(int fd)
{
    if (hello_of[fd] == NODE_HELLO_COMMAND) {
        obey(fd);
        return;
    }
    char hello;
    int given;
    ssize_t got = receive(fd, &hello, &given);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    bool fits = got == 1 && slot_of[fd] == NO_SLOT && file_of[fd] < 0 &&
                hello_of[fd] != NODE_HELLO_EVENTS;
    if (fits)
        hello_of[fd] = hello;
    struct node_welcome welcome = {.ok = 1};
    if (fits && (hello == NODE_HELLO_SHARE || hello == NODE_HELLO_FETCH || hello == NODE_HELLO_KEEP)) {
        fits = exchange(fd, hello, given, &welcome);
    } else if (fits) {
        if (hello == NODE_HELLO_CUDA) {
            slot_of[fd] = take_slot(peer_of(fd), &welcome.generation);
            welcome.slot = slot_of[fd];
            welcome.ok = slot_of[fd] != NO_SLOT;
        }
        fits = answer(fd, &welcome, -1);
    }
    if (given >= 0 && given != file_of[fd])
        close(given);
    if (!fits)
        hang_up(fd);
}

static void watch_signals(void)
{
    sigset_t ending;
    sigemptyset(&ending);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGINT);
    sigprocmask(SIG_BLOCK, &ending, NULL);
    signals = signalfd(-1, &ending, SFD_CLOEXEC);
    watch(signals);
}

/* Whoever started the server waits for this line, and must not be kept waiting for the end of it. */
static void say_ready(void)
{
    puts("ready");
    fflush(stdout);
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; nowhere >= 0 && fd < 3; fd++)
        dup2(nowhere, fd);
}

static void serve(int idle_ms)
{
    struct epoll_event ready[64];
    for (;;) {
        int patience = orphans ? ORPHANS_MS : clients == 0 ? idle_ms : -1;
        int count = epoll_wait(events, ready, 64, patience);
        bool looked = orphans;
        look_at_orphans();
        if (count == 0 && !looked)
            return;
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == signals)
                return;
            if (fd == listener)
                accept_clients();
            else
                hear(fd);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 2 && !(argc == 4 && strcmp(argv[2], "--idle-seconds") == 0))
        fail("usage: fenka-cardserver NODE [--idle-seconds N]   (0 = stay for ever)");
    directory = argv[1];
    int idle_ms = argc == 4 ? atoi(argv[3]) * 1000 : 30000;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    memset(file_of, -1, sizeof file_of);
    open_state();
    events = epoll_create1(EPOLL_CLOEXEC);
    forget_everyone();
    watch_signals();
    listen_for_clients();
    say_ready();
    serve(idle_ms > 0 ? idle_ms : -1);
    unlink(SOCKET_NAME);
    return 0;
}
