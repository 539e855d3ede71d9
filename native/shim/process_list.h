/* Lists of processes as NVML returns them, reduced to the lease's own processes. */
#ifndef FENKA_PROCESS_LIST_H
#define FENKA_PROCESS_LIST_H
#include <stdbool.h>

#include "resolve.h"

#define MAX_PROCESSES 1024

/* All versions of an entry begin with these fields; the rest (MIG instances) is all ones if not applicable. */
struct process {
    unsigned int pid;
    unsigned long long bytes;
};

typedef nvmlReturn_t (*process_function)(nvmlDevice_t, unsigned int *, void *);

struct process_list {
    char *driver, *kept; /* arrays of MAX_PROCESSES entries */
    size_t stride;
    unsigned int in_driver, count;
};

/* Fills `kept` with the lease's processes on the card. `compute`: including those that the driver does not list. */
void process_list_filter(struct process_list *list, unsigned card, bool compute);
#endif
