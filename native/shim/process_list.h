/* Lists of processes, as NVML gives them: the lease's own only. */
#ifndef FENKA_PROCESSES_H
#define FENKA_PROCESSES_H
#include <stdbool.h>

#include "resolve.h"

#define MAX_PROCESSES 1024
/* What NVML's hooks answer while the lease is broken. */
#define BROKEN NVML_ERROR_NO_PERMISSION

/* The lease's card that this is; -1 = none. */
int nvml_card(nvmlDevice_t device);

/* All versions of a process begin alike; the rest (MIG instances) is all ones where it does not apply. */
struct process {
    unsigned int pid;
    unsigned long long bytes;
};

typedef nvmlReturn_t (*process_function)(nvmlDevice_t, unsigned int *, void *);

struct process_list {
    char *driver, *kept; /* room for MAX_PROCESSES each */
    size_t stride;
    unsigned int in_driver, count;
};

/* From what the driver has listed to what is kept; `compute`: also of ours what it has not. */
void process_list_filter(struct process_list *list, unsigned card, bool compute);
#endif
