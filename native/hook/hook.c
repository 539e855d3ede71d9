/* The createRuntime hook of a container with a device of fenka's: `fenka-hook slice=4`, the OCI state on standard input.
 *
 * It gives the daemon copies of the state and of the bundle's config.json, and a descriptor of the container's init. The
 * daemon answers with detached mounts, which a child places in the container. No path of the image is resolved: the place
 * is the mount that the engine made with the source name "fenka-lease". It exits with 0, or with a sentence on standard
 * error, which the engine shows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "json.h"

#define RUNTIME "/run/fenka"
#define SOCKET "/containers.sock"
#define PLACE " fenka-lease "
#define STATE_BYTES (1 << 20)
#define CONFIG_BYTES (4 << 20)
#define ANSWER_BYTES 8192
#define MAX_MOUNTS 64
#define WAIT_S 30
#define POLL_NS 50000000

/* Of linux/mount.h, which old headers lack. */
#define F_EMPTY_PATH 0x04
#define T_EMPTY_PATH 0x40
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif

enum outcome { DONE, LOST };

struct mounts {
    int count, descriptors[MAX_MOUNTS];
    char answer[ANSWER_BYTES]; /* "+", then each mount's place, "" and "lease" and so on, with a NUL byte behind it */
};

/* Descriptors: what the daemon gets, and the list of the container's mounts, as its own /proc may not show it. */
struct container {
    int state, config, init, mountinfo;
};

static char buffer[CONFIG_BYTES + 1];

static void say(const char *words[]) {
    char line[1024] = "fenka: ";
    size_t used = strlen(line);
    for (; *words; words++)
        for (const char *at = *words; *at && used < sizeof line - 2; at++)
            line[used++] = *at;
    line[used++] = '\n';
    if (write(STDERR_FILENO, line, used) < 0)
        _exit(2);
}

static _Noreturn void fail(const char *what, const char *why) {
    say((const char *[]){what, why, NULL});
    _exit(1);
}

static size_t read_all(int descriptor, size_t most, const char *too_large) {
    size_t bytes = 0;
    ssize_t more;
    while ((more = read(descriptor, buffer + bytes, most + 1 - bytes)) != 0) {
        if (more < 0 && errno != EINTR)
            fail("a file of the container cannot be read: ", strerror(errno));
        bytes += more > 0 ? (size_t)more : 0;
        if (bytes > most)
            fail(too_large, "");
    }
    buffer[bytes] = 0;
    return bytes;
}

/* Sealed memory: reading it never makes the daemon wait, as a file of another's file system could. */
static int sealed_copy(size_t bytes) {
    int descriptor = memfd_create("fenka-hook", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    for (size_t written = 0; descriptor >= 0 && written < bytes;) {
        ssize_t more = write(descriptor, buffer + written, bytes - written);
        if (more < 0)
            fail("no memory for the container's description: ", strerror(errno));
        written += (size_t)more;
    }
    if (fcntl(descriptor, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE))
        fail("the container's description cannot be sealed: ", strerror(errno));
    return descriptor;
}

static int open_config(const char *state) {
    char path[4096 + 16];
    if (!json_string(json_member(state, "bundle"), path, 4096))
        fail("the runtime names no bundle on standard input: this program is a createRuntime hook", "");
    strcat(path, "/config.json");
    int config = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (config < 0)
        fail("the bundle's config.json cannot be opened: ", strerror(errno));
    return config;
}

static int open_mountinfo(int pid) {
    char path[32] = "/proc/", digits[12], *at = digits + sizeof digits - 1;
    for (*at = 0; pid > 0; pid /= 10)
        *--at = (char)('0' + pid % 10);
    return open(strcat(strcat(path, at), "/mountinfo"), O_RDONLY | O_CLOEXEC);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* At a boot, engines may start containers before the daemon. */
static void start_daemon(void) {
    static bool asked;
    char *words[] = {"systemctl", "start", "--no-block", "fenka.service", NULL}, *none[] = {NULL};
    pid_t child;
    if (asked || geteuid() != 0 || access("/run/systemd/system", F_OK) ||
        access("/usr/lib/systemd/system/fenka.service", F_OK))
        return;
    asked = true;
    if (posix_spawn(&child, "/usr/bin/systemctl", NULL, NULL, words, none) == 0)
        waitpid(child, NULL, 0);
}

static int connect_daemon(int64_t deadline) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *runtime = getenv("FENKA_RUNTIME");
    runtime = runtime && *runtime ? runtime : RUNTIME;
    if (strlen(runtime) + sizeof SOCKET > sizeof address.sun_path)
        fail("FENKA_RUNTIME is too long a path for a socket", "");
    strcat(strcpy(address.sun_path, runtime), SOCKET);
    for (;;) {
        int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        // A daemon that accepts nothing leaves its queue full, in which connect would wait without end.
        struct timeval second = {.tv_sec = 1};
        setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
        if (connection >= 0 && connect(connection, (struct sockaddr *)&address, sizeof address) == 0)
            return connection;
        if (now_ns() > deadline)
            fail("no fenka daemon of root's has answered within 30 s: start it (`systemctl start fenka`), then start "
                 "the "
                 "container again; ",
                 strerror(errno));
        if (connection >= 0)
            close(connection);
        start_daemon();
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
}

static bool request(int connection, const char *device, const struct container *container) {
    const int descriptors[] = {container->state, container->config, container->init};
    char control[CMSG_SPACE(sizeof descriptors)] = {0};
    struct iovec words = {(void *)(uintptr_t)device, strlen(device)};
    struct msghdr message = {.msg_iov = &words, .msg_iovlen = 1, .msg_control = control};
    message.msg_controllen = sizeof control;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    header->cmsg_len = CMSG_LEN(sizeof descriptors);
    memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
    return sendmsg(connection, &message, MSG_NOSIGNAL) >= 0;
}

static bool receive(int connection, struct mounts *mounts) {
    static char control[CMSG_SPACE(MAX_MOUNTS * sizeof(int))];
    struct iovec words = {mounts->answer, sizeof mounts->answer - 1};
    struct msghdr message = {.msg_iov = &words, .msg_iovlen = 1, .msg_control = control};
    message.msg_controllen = sizeof control;
    ssize_t bytes = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    if (bytes <= 0)
        return false;
    mounts->answer[bytes] = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    mounts->count = 0;
    if (header && header->cmsg_type == SCM_RIGHTS) {
        mounts->count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(mounts->descriptors, CMSG_DATA(header), (size_t)mounts->count * sizeof(int));
    }
    return true;
}

static char root[4096]; /* of the container's files, as mountinfo has it */

/* Decode the escapes of a field of mountinfo in place: the kernel writes blanks, newlines and backslashes in octal. */
static void decode_octal(char *field) {
    char *to = field;
    for (const char *at = field; *at; to++) {
        if (at[0] == '\\' && at[1] >= '0' && at[1] <= '3' && at[2] >= '0' && at[2] <= '7' && at[3] >= '0' &&
            at[3] <= '7') {
            *to = (char)((at[1] - '0') * 64 + (at[2] - '0') * 8 + (at[3] - '0'));
            at += 4;
        } else {
            *to = *at++;
        }
    }
    *to = 0;
}

/* Return a line's mount point, if it is the wanted one: a path, or without one the place of the lease. A line of
 * mountinfo: "36 35 98:0 /root /point options … - type source …". */
static char *mount_point(char *line, const char *path) {
    char *type = strstr(line, " - "), *point = line;
    if (!type || (!path && strncmp(type, " - tmpfs" PLACE, strlen(" - tmpfs" PLACE))))
        return NULL;
    for (int field = 0; field < 4 && point; field++)
        point = strchr(point + 1, ' ');
    if (!point || !strchr(point + 1, ' '))
        return NULL;
    *strchr(++point, ' ') = 0;
    decode_octal(point);
    return !path || !strcmp(point, path) ? point : NULL;
}

/* Open the last such mount. No link is followed: the kernel names mount points by resolved paths. */
static int find_mount(int mountinfo, const char *path) {
    int found = -1;
    lseek(mountinfo, 0, SEEK_SET); /* an earlier child may have read it */
    read_all(mountinfo, CONFIG_BYTES, "the container has too many mounts");
    for (char *line = strtok(buffer, "\n"); line; line = strtok(NULL, "\n")) {
        char *point = mount_point(line, path);
        if (!point)
            continue;
        if (found >= 0)
            close(found);
        found = open(point, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        if (!path && strlen(point) < sizeof root)
            strcpy(root, point);
    }
    return found;
}

/* Where an engine has mounted a closed device node of the machine's, as one does whose root is no root outside. */
static bool cover_node(int mountinfo, int descriptor, const char *name) {
    char path[sizeof root + 64];
    size_t length = strlen(root) - strlen(RUNTIME); /* the place is at /run/fenka */
    if (strlen(name) >= 64 || strlen(root) < strlen(RUNTIME) || strcmp(root + length, RUNTIME))
        return true;
    memcpy(path, root, length);
    strcpy(path + length, name);
    int node = find_mount(mountinfo, path);
    if (node < 0)
        return true;
    long result = syscall(SYS_move_mount, descriptor, "", node, "", F_EMPTY_PATH | T_EMPTY_PATH);
    close(node);
    return result == 0;
}

static int place_mounts(const struct container *container, const struct mounts *mounts) {
    const char *name = mounts->answer + 1;
    if (setns(container->init, CLONE_NEWNS))
        fail("the container's mounts cannot be entered: ", strerror(errno));
    int place = find_mount(container->mountinfo, NULL);
    if (place < 0)
        fail("this container has no place for a slice: it runs in a virtual machine or a sandbox (Kata, gVisor), which "
             "fenka does not serve, or another mount covers /run/fenka",
             "");
    for (int i = 0; i < mounts->count; i++, name += strlen(name) + 1) {
        /* The first one has the mount points of the others. */
        int base = i ? mounts->descriptors[0] : place;
        if (*name == '/' ? !cover_node(container->mountinfo, mounts->descriptors[i], name)
                         : syscall(SYS_move_mount, mounts->descriptors[i], "", base, name,
                                   F_EMPTY_PATH | (i ? 0 : T_EMPTY_PATH))) {
            say((const char *[]){"the container cannot get ", *name ? name : "/run/fenka", ": ", strerror(errno),
                                 NULL});
            return 1;
        }
    }
    return 0;
}

static enum outcome converse(int connection, const char *device, const struct container *container) {
    static struct mounts mounts;
    char end;
    int status = 0;
    if (!request(connection, device, container) || !receive(connection, &mounts))
        return LOST;
    if (*mounts.answer != '+')
        fail(mounts.answer + 1, "");
    if (!mounts.count)
        fail("the daemon has sent no mounts: this program has too few descriptors", "");
    /* A child, since this process needs its own mounts to reach the next daemon. */
    pid_t child = fork();
    if (child == 0)
        _exit(place_mounts(container, &mounts));
    for (int i = 0; i < mounts.count; i++)
        close(mounts.descriptors[i]);
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        _exit(1);
    return send(connection, "ok", 2, MSG_NOSIGNAL) == 2 && recv(connection, &end, 1, 0) == 1 ? DONE : LOST;
}

int main(int argc, char **argv) {
    int64_t deadline = now_ns() + WAIT_S * INT64_C(1000000000);
    if (argc < 2)
        fail("which device? usage: fenka-hook slice=4", "");
    size_t bytes =
        read_all(STDIN_FILENO, STATE_BYTES, "the container's state has more than 1 MiB: shorten its annotations");
    struct container container = {.state = sealed_copy(bytes)};
    int pid = json_number(json_member(buffer, "pid")), config = open_config(buffer);
    container.mountinfo = open_mountinfo(pid);
    bytes = read_all(config, CONFIG_BYTES,
                     "the container's configuration has more than 4 MiB: shorten its environment and annotations");
    container.config = sealed_copy(bytes);
    container.init = (int)syscall(SYS_pidfd_open, pid, 0);
    if (container.init < 0 || container.mountinfo < 0)
        fail("the container's process is gone: ", strerror(errno));
    for (;;) {
        int connection = connect_daemon(deadline);
        if (converse(connection, argv[1], &container) == DONE)
            return 0;
        close(connection);
        /* A daemon that was killed; the next one knows the request. */
        if (now_ns() > deadline)
            fail("the fenka daemon has not answered within 30 s; `fenka doctor` checks it", "");
    }
}
