#include "process_list.h"

#include <string.h>

#include "account.h"

static const char *find_in_driver(const struct process_list *list, uint32_t pid) {
    for (unsigned int i = 0; i < list->in_driver; i++) {
        const char *entry = list->driver + i * list->stride;
        if (((const struct process *)entry)->pid == pid)
            return entry;
    }
    return NULL;
}

/* The driver reports the host's PIDs. In a container those differ, and only the account knows the processes. Memory
 * always comes from the account, so that the lines add up to the used memory. */
void process_list_filter(struct process_list *list, unsigned card, bool compute) {
    uint32_t pid;
    uint64_t bytes;
    int slot = -1;
    account_reap(card);
    while ((slot = account_next_process((unsigned)(slot + 1), card, &pid, &bytes)) >= 0 &&
           list->count < MAX_PROCESSES) {
        const char *known = find_in_driver(list, pid);
        if (!known && !(compute && bytes))
            continue;
        char *entry = list->kept + list->count++ * list->stride;
        if (known)
            memcpy(entry, known, list->stride);
        else
            memset(entry, 0xff, list->stride);
        ((struct process *)entry)->pid = pid;
        ((struct process *)entry)->bytes = bytes;
    }
}
