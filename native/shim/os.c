#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct stat_line {
    uint32_t pid;
    char state;
    uint64_t threads, start_time;
};

/* False if the file cannot be read, which says nothing about the process (hidepid). */
static bool read_stat(const char *path, struct stat_line *out) {
    char text[1024];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may contain spaces and parentheses */
    if (!at || at[1] != ' ')
        return false;
    out->pid = (uint32_t)strtoul(text, NULL, 10);
    out->state = at[2];
    at += 3;
    for (int field = 4; field <= 22; field++) {
        uint64_t value = strtoull(at, &at, 10);
        if (field == 20)
            out->threads = value;
        out->start_time = value;
    }
    return true;
}

/* A link reads "pid:[4026531836]"; the number has 32 bits. */
static uint64_t inode_in(const char *path) {
    char link[64];
    ssize_t n = readlink(path, link, sizeof link - 1);
    link[n > 0 ? n : 0] = 0;
    const char *number = strchr(link, '[');
    return number ? strtoull(number + 1, NULL, 10) & UINT32_MAX : 0;
}

/* Start times depend on the reader's time namespace. */
bool os_self(struct os_process *self) {
    struct stat_line line;
    uint64_t namespace = inode_in("/proc/self/ns/pid");
    if (!namespace || !read_stat("/proc/self/stat", &line) || line.pid != (uint32_t)getpid())
        return false;
    self->pid = line.pid;
    self->start_time = line.start_time;
    self->namespace = namespace | inode_in("/proc/self/ns/time") << 32;
    return true;
}

bool os_process_absent(uint32_t pid) { return kill((pid_t)pid, 0) < 0 && errno == ESRCH; }

bool os_process_ended(uint32_t pid, uint64_t start_time, uint64_t start_mask) {
    char path[32];
    struct stat_line line;
    if (os_process_absent(pid))
        return true;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    if (!read_stat(path, &line))
        return false;
    if ((line.start_time & start_mask) != (start_time & start_mask))
        return true;
    /* A main thread that has ended is a zombie too, while other threads run. */
    return (line.state == 'Z' || line.state == 'X') && line.threads <= 1;
}

bool os_executable(uint32_t pid, char *path, size_t room) {
    char link[32];
    snprintf(link, sizeof link, "/proc/%u/exe", pid);
    ssize_t n = readlink(link, path, room - 1);
    if (n > 0)
        path[n] = 0;
    return n > 0;
}

enum os_result os_map(const char *path, size_t bytes, bool writable, void **address) {
    int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR ? OS_MISSING : OS_UNREADABLE;
    enum os_result result = OS_OK;
    if (lseek(fd, 0, SEEK_END) != (off_t)bytes)
        result = OS_WRONG_SIZE;
    else {
        *address = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
        if (*address == MAP_FAILED)
            result = OS_UNREADABLE;
    }
    close(fd);
    return result;
}

/* ---- mappings whose file may become shorter ---- */

#define GUARDED 4

static struct {
    uintptr_t begin, bytes; /* bytes: 0 = none */
    void (*lost)(void);
} guarded[GUARDED];
static struct sigaction before;

/* An unhandled fault occurs again at once, with the default action. */
static void pass_on(int number, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        struct sigaction none = {.sa_handler = SIG_DFL};
        sigaction(number, &none, NULL);
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    int saved_errno = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (unsigned i = 0; i < GUARDED; i++) {
        uintptr_t begin = guarded[i].begin, bytes = __atomic_load_n(&guarded[i].bytes, __ATOMIC_ACQUIRE);
        if (info->si_code <= 0 || at - begin >= bytes)
            continue;
        if (mmap((void *)begin, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            break;
        if (guarded[i].lost)
            guarded[i].lost();
        errno = saved_errno;
        return;
    }
    errno = saved_errno;
    pass_on(number, info, context);
}

/* A handler that the program installs later replaces this one. */
void os_guard(void *address, size_t bytes, void (*lost)(void)) {
    struct sigaction handler = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART}, now;
    for (unsigned i = 0; i < GUARDED; i++) {
        if (guarded[i].bytes)
            continue;
        guarded[i].begin = (uintptr_t)address;
        guarded[i].lost = lost;
        __atomic_store_n(&guarded[i].bytes, bytes, __ATOMIC_RELEASE);
        break;
    }
    sigemptyset(&handler.sa_mask);
    if (sigaction(SIGBUS, NULL, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault))
        return;
    before = now;
    sigaction(SIGBUS, &handler, NULL);
}

void os_unguard(void *address) {
    for (unsigned i = 0; i < GUARDED; i++)
        if (guarded[i].begin == (uintptr_t)address)
            __atomic_store_n(&guarded[i].bytes, 0, __ATOMIC_RELEASE);
}

enum os_result os_read_file(const char *path, size_t limit, size_t *bytes, void **address) {
    struct stat found;
    size_t got = 0;
    ssize_t more = 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR ? OS_MISSING : OS_UNREADABLE;
    bool fits =
        fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 0 && (uint64_t)found.st_size <= limit;
    *bytes = fits ? (size_t)found.st_size : 0;
    *address = fits ? os_alloc_pages(*bytes) : NULL;
    while (*address && got < *bytes && more > 0) {
        more = read(fd, (char *)*address + got, *bytes - got);
        got += more > 0 ? (size_t)more : 0;
        more = more < 0 && errno == EINTR ? 1 : more;
    }
    close(fd);
    if (*address && got == *bytes)
        return OS_OK;
    if (*address)
        os_unmap(*address, *bytes);
    return OS_WRONG_SIZE;
}

bool os_exists(const char *path) { return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR); }

void os_read_text(const char *path, char *text, size_t room) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t bytes = fd >= 0 ? read(fd, text, room - 1) : 0;
    if (fd >= 0)
        close(fd);
    text[bytes > 0 ? bytes : 0] = 0;
    text[strcspn(text, "\n")] = 0;
}

void os_unmap(void *address, size_t bytes) { munmap(address, bytes); }

/* A line of /proc/self/maps: "start-end rwxp offset device inode path". Offset, device and inode identify the
 * mapping's file and position. */
unsigned os_count_mappings(const void *address) {
    char line[4352], file[96] = "";
    unsigned times = 0;
    /* The first pass finds the mapping's own line, the second counts equal ones. */
    for (int pass = 0; pass < 2; pass++) {
        FILE *maps = fopen("/proc/self/maps", "re");
        while (maps && fgets(line, sizeof line, maps)) {
            unsigned long start;
            char offset[20], device[16], inode[24], position[96];
            if (sscanf(line, "%lx-%*x %*4s %19s %15s %23s", &start, offset, device, inode) != 4)
                continue;
            snprintf(position, sizeof position, "%s %s %s", offset, device, inode);
            if (pass == 0 && start == (unsigned long)address)
                strcpy(file, position);
            times += pass == 1 && !strcmp(file, position);
        }
        if (maps)
            fclose(maps);
    }
    return times;
}

#define OFD_GETLK 36 /* F_OFD_GETLK, F_OFD_SETLK, which old headers lack */
#define OFD_SETLK 37

/* A write lock for descriptors that are open for writing only. */
bool os_set_file_lock(int descriptor, uint64_t first, uint64_t length) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)first, .l_len = (off_t)length};
    if (fcntl(descriptor, OFD_SETLK, &lock) == 0)
        return true;
    lock.l_type = F_WRLCK;
    lock.l_pid = 0;
    return fcntl(descriptor, OFD_SETLK, &lock) == 0;
}

int os_open_locked(const char *path, uint64_t byte) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || os_set_file_lock(fd, byte, 1))
        return fd;
    close(fd);
    return -1;
}

bool os_byte_locked(const char *path, uint64_t byte) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return true;
    bool locked = fcntl(fd, OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    close(fd);
    return locked;
}

/* "1: OFDLCK ADVISORY  READ -1 00:01:14 FIRST LAST"; a waiting request is marked by an arrow. */
bool os_each_file_lock(const char *path, void (*each)(void *to, uint64_t first, uint64_t last), void *to) {
    char line[256];
    FILE *locks = fopen(path, "re");
    if (!locks)
        return false;
    while (fgets(line, sizeof line, locks)) {
        unsigned long long first, last;
        const char *at = strstr(line, "OFDLCK");
        if (at && !strstr(line, "->") && sscanf(at, "%*s %*s %*s %*s %*s %llu %llu", &first, &last) == 2)
            each(to, first, last);
    }
    bool whole = !ferror(locks);
    fclose(locks);
    return whole;
}

uint64_t os_random(void) {
    uint64_t chance = 0;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &chance, sizeof chance) != (ssize_t)sizeof chance)
        chance = os_nanoseconds() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid();
    if (fd >= 0)
        close(fd);
    return chance;
}

void *os_alloc_pages(size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

void *os_grow(void *table, size_t entry_bytes, size_t *capacity, size_t first) {
    size_t more = *capacity ? 2 * *capacity : first;
    void *larger = os_alloc_pages(more * entry_bytes);
    if (larger && *capacity) {
        memcpy(larger, table, *capacity * entry_bytes);
        os_unmap(table, *capacity * entry_bytes);
    }
    if (larger)
        *capacity = more;
    return larger;
}

uint64_t os_milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

uint64_t os_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Signals of the program may end it sooner. */
void os_sleep_until(uint64_t nanoseconds) {
    struct timespec at = {.tv_sec = (time_t)(nanoseconds / 1000000000), .tv_nsec = (long)(nanoseconds % 1000000000)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

void os_yield(void) { sched_yield(); }

bool os_is_first_process(void) { return getpid() == 1; }

static void end_by_signal(int number) { _exit(128 + number); }

void os_obey_signals(bool obey) {
    static struct sigaction terminate, interrupt;
    if (obey) {
        struct sigaction end = {.sa_handler = end_by_signal};
        sigaction(SIGTERM, &end, &terminate);
        sigaction(SIGINT, &end, &interrupt);
    } else {
        sigaction(SIGTERM, &terminate, NULL);
        sigaction(SIGINT, &interrupt, NULL);
    }
}

void os_print_error(const char *line) {
    ssize_t ignored = write(STDERR_FILENO, line, strlen(line));
    (void)ignored;
}
