#include "export_locks.h"

#include <stdio.h>

#include "fenka/lease.h"
#include "os.h"

bool export_lock_set(int descriptor, uint64_t first, uint64_t bytes) {
    return os_set_file_lock(descriptor, first, bytes / FENKA_EXPORT_LOCK_UNIT + (bytes % FENKA_EXPORT_LOCK_UNIT != 0));
}

struct reading {
    void (*each)(void *to, const struct export_lock *export_lock);
    void *to;
};

/* Other programs set such locks too, but hardly ever at offsets this large. */
static void parse(void *to, uint64_t first, uint64_t last) {
    const struct reading *reading = to;
    struct export_lock export_lock = {.first = first};
    uint64_t units = last - first + 1;
    if (last < first || units > UINT32_MAX || first >> FENKA_EXPORT_LOCK_LEASE == 0)
        return;
    export_lock.bytes = units * FENKA_EXPORT_LOCK_UNIT;
    reading->each(reading->to, &export_lock);
}

static void copy(void *to, const struct export_lock *export_lock) { *(struct export_lock *)to = *export_lock; }

bool export_lock_read(int descriptor, struct export_lock *out) {
    char path[48];
    struct reading reading = {copy, out};
    *out = (struct export_lock){0};
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor);
    return os_each_file_lock(path, parse, &reading) && out->first;
}

bool export_locks_each(void (*each)(void *to, const struct export_lock *export_lock), void *to) {
    struct reading reading = {each, to};
    return os_each_file_lock("/proc/locks", parse, &reading);
}
