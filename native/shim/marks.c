#include "marks.h"

#include <stdio.h>

#include "fenka/lease.h"
#include "os.h"

bool marks_put(int descriptor, uint64_t first, uint64_t bytes) {
    return os_lock_file(descriptor, first, bytes / FENKA_MARK_UNIT + (bytes % FENKA_MARK_UNIT != 0));
}

struct reading {
    void (*each)(void *to, const struct mark *mark);
    void *to;
};

/* Other programs have such locks as well; theirs are hardly ever as far out. */
static void take(void *to, uint64_t first, uint64_t last) {
    const struct reading *reading = to;
    struct mark mark = {.first = first};
    uint64_t units = last - first + 1;
    if (last < first || units > UINT32_MAX || first >> FENKA_MARK_LEASE == 0)
        return;
    mark.bytes = units * FENKA_MARK_UNIT;
    reading->each(reading->to, &mark);
}

static void keep(void *to, const struct mark *mark) {
    *(struct mark *)to = *mark;
}

bool marks_read(int descriptor, struct mark *out) {
    char path[48];
    struct reading reading = {keep, out};
    *out = (struct mark){0};
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor);
    return os_locks(path, take, &reading) && out->first;
}

bool marks_each(void (*each)(void *to, const struct mark *mark), void *to) {
    struct reading reading = {each, to};
    return os_locks("/proc/locks", take, &reading);
}
