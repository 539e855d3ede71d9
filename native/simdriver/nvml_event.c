/* Event sets. Each is a connection to the card server, which sends every event to every set; events that a set is
 * not registered for are dropped here. So the kernel keeps the queue, and waiting is poll(). The real NVML reports
 * the last XID's number for all XIDs of a card; here each event keeps its own. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nvml_device.h"

#define ECC_EVENTS (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError)
#define TYPES 9 /* bits 0 to 8 hold all types that occur here */
#define NOT_ASKED_FOR UINT64_MAX
#define NS_PER_MS 1000000

struct nvmlEventSet_st {
    int line;
    ino_t inode; /* checked because a program may close the descriptor, whose number is then reused */
    pid_t owner; /* a forked child has the parent's connection and must not read from it */
    unsigned waiting;
    bool freed;
    /* The event after which events of this type on this card count. */
    uint64_t since[FENKA_NODE_CARDS][TYPES];
    struct nvmlEventSet_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nvmlEventSet_st *sets;

/* A child inherits the lock in the state of another thread of the parent. */
static void enter(void) {
    static pid_t owner;
    pid_t self = getpid();
    if (__atomic_load_n(&owner, __ATOMIC_RELAXED) != self) {
        if (owner != 0)
            lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        __atomic_store_n(&owner, self, __ATOMIC_RELAXED);
    }
    pthread_mutex_lock(&lock);
}

static void leave(void) { pthread_mutex_unlock(&lock); }

/* Under the lock. The link that points to this set; *link is NULL if the set is not in the list. */
static struct nvmlEventSet_st **find(nvmlEventSet_t set) {
    struct nvmlEventSet_st **at = &sets;
    while (*at && *at != set)
        at = &(*at)->next;
    return at;
}

static bool line_is_ours(const struct nvmlEventSet_st *set) {
    struct stat found;
    return fstat(set->line, &found) == 0 && found.st_ino == set->inode;
}

static void destroy(struct nvmlEventSet_st *set) {
    if (line_is_ours(set))
        close(set->line);
    free(set);
}

/* Under the lock. A thread that waits in the set frees it. */
static void take_out(struct nvmlEventSet_st **at) {
    struct nvmlEventSet_st *set = *at;
    *at = set->next;
    set->freed = true;
    if (set->owner == getpid() && line_is_ours(set))
        shutdown(set->line, SHUT_RDWR);
    if (set->waiting == 0 || set->owner != getpid())
        destroy(set);
}

void nvml_events_end(void) {
    enter();
    while (sets)
        take_out(&sets);
    leave();
}

static unsigned long long supported(uint32_t card) {
    return nvmlEventTypeXidCriticalError | (node_state->faults[card].ecc ? ECC_EVENTS : 0) |
           (node_state->mig[card].profile_count ? nvmlEventMigConfigChange : 0);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (!types)
        return NVML_ERROR_INVALID_ARGUMENT;
    *types = supported(card);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    TRY(nvml_ready());
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct nvmlEventSet_st *made = calloc(1, sizeof *made);
    if (!made)
        return NVML_ERROR_MEMORY;
    struct stat found;
    made->line = node_call(NODE_HELLO_EVENTS);
    if (made->line < 0 || fstat(made->line, &found) != 0) {
        free(made);
        return NVML_ERROR_UNKNOWN;
    }
    made->inode = found.st_ino;
    made->owner = getpid();
    for (uint32_t card = 0; card < FENKA_NODE_CARDS; card++)
        for (int type = 0; type < TYPES; type++)
            made->since[card][type] = NOT_ASKED_FOR;
    enter();
    made->next = sets;
    sets = made;
    leave();
    *set = made;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    TRY(nvml_ready());
    enter();
    struct nvmlEventSet_st **at = find(set);
    bool found = *at != NULL;
    if (found)
        take_out(at);
    leave();
    return found ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    uint32_t card;
    TRY(nvml_card(device, &card));
    if (types & ~supported(card))
        return NVML_ERROR_NOT_SUPPORTED;
    uint64_t now = __atomic_load_n(&node_state->event_count, __ATOMIC_ACQUIRE);
    enter();
    bool found = *find(set) != NULL;
    for (int type = 0; found && type < TYPES; type++)
        if (types >> type & 1 && set->since[card][type] == NOT_ASKED_FOR)
            set->since[card][type] = now;
    leave();
    return found ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/* Under the lock. */
static bool wanted(const struct nvmlEventSet_st *set, const struct node_event *event) {
    for (int type = 0; type < TYPES; type++)
        if (event->type == 1ull << type)
            return event->card < FENKA_NODE_CARDS && set->since[event->card][type] < event->number;
    return false;
}

/* NVML_ERROR_NO_DATA where there was none, or none that was asked for. One at a time: another thread
 * may wait for the next. */
static nvmlReturn_t take_one(struct nvmlEventSet_st *set, nvmlEventData_t *data) {
    struct node_event event;
    enter();
    bool ours = line_is_ours(set);
    ssize_t got = ours ? recv(set->line, &event, sizeof event, MSG_DONTWAIT) : 0;
    bool none = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    bool freed = set->freed, asked = got == (ssize_t)sizeof event && wanted(set, &event);
    leave();
    if (freed)
        return NVML_ERROR_UNINITIALIZED;
    if (!none && got != (ssize_t)sizeof event)
        return NVML_ERROR_GPU_IS_LOST; /* the server has ended, or the connection to it */
    if (!asked)
        return NVML_ERROR_NO_DATA;
    *data = (nvmlEventData_t){.device = nvml_handle(event.card),
                              .eventType = event.type,
                              .eventData = event.data,
                              .gpuInstanceId = UINT32_MAX,
                              .computeInstanceId = UINT32_MAX};
    return NVML_SUCCESS;
}

static nvmlReturn_t wait_until(struct nvmlEventSet_st *set, nvmlEventData_t *data, uint64_t deadline_ns) {
    nvmlReturn_t result;
    while ((result = take_one(set, data)) == NVML_ERROR_NO_DATA) {
        uint64_t now = node_now();
        uint64_t left = now < deadline_ns ? deadline_ns - now : 0;
        uint64_t left_ms = (left + NS_PER_MS - 1) / NS_PER_MS;
        struct pollfd line = {.fd = set->line, .events = POLLIN};
        int ready = poll(&line, 1, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
        if (ready == 0 && node_now() >= deadline_ns)
            return NVML_ERROR_TIMEOUT;
        if (ready < 0 && errno != EINTR)
            return NVML_ERROR_UNKNOWN;
    }
    return result;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    TRY(nvml_ready());
    if (!data)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t deadline_ns = node_now() + (uint64_t)timeout_ms * NS_PER_MS;
    enter();
    bool usable = *find(set) != NULL && set->owner == getpid();
    if (usable)
        set->waiting++;
    leave();
    if (!usable)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = wait_until(set, data, deadline_ns);
    enter();
    bool last = --set->waiting == 0 && set->freed;
    leave();
    if (last)
        destroy(set);
    return result;
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}
