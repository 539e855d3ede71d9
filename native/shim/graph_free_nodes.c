#include "graph_free_nodes.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "os.h"

#define FIRST_CAPACITY 256

struct free_node {
    uint64_t graph, pointer;
    uint64_t number;  /* in the order of adding */
    uint64_t capture; /* in progress; 0 = none */
};

static struct os_lock lock;
static struct free_node *nodes;
static uint64_t added;
static size_t count, capacity;

void free_nodes_reset(void) {
    lock.held = 0;
    nodes = NULL;
    count = capacity = 0;
}

static uint64_t next_number(void) { return __atomic_fetch_add(&added, 1, __ATOMIC_RELAXED); }

uint64_t free_nodes_added(void) { return __atomic_load_n(&added, __ATOMIC_RELAXED); }

void free_nodes_add(uint64_t graph, uint64_t pointer, uint64_t capture) {
    os_lock(&lock);
    struct free_node *larger = count < capacity ? nodes : os_grow(nodes, sizeof *nodes, &capacity, FIRST_CAPACITY);
    if (larger) {
        nodes = larger;
        nodes[count++] = (struct free_node){graph, pointer, next_number(), capture};
    }
    os_unlock(&lock);
}

void free_nodes_end_capture(uint64_t capture, uint64_t graph) {
    os_lock(&lock);
    for (size_t i = 0; i < count;) {
        struct free_node *node = &nodes[i++];
        if (node->capture != capture)
            continue;
        if (graph)
            *node = (struct free_node){graph, node->pointer, next_number(), 0};
        else
            nodes[--i] = nodes[--count];
    }
    os_unlock(&lock);
}

void free_nodes_run(uint64_t graph, uint64_t below, void (*freed)(uint64_t pointer)) {
    os_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if (nodes[i].graph == graph && nodes[i].number < below && !nodes[i].capture)
            freed(nodes[i].pointer);
    os_unlock(&lock);
}

void free_nodes_drop(uint64_t graph) {
    os_lock(&lock);
    for (size_t i = 0; i < count;)
        if (nodes[i].graph == graph)
            nodes[i] = nodes[--count];
        else
            i++;
    os_unlock(&lock);
}
