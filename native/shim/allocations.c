#include "allocations.h"

#include <string.h>

#include "os.h"

#define SHARDS 64
#define FIRST_CAPACITY 64 /* a power of two */

struct shard {
    struct os_lock lock;
    uint32_t capacity, count;
    struct allocation *table; /* open addressing, linear probing, no tombstones */
} __attribute__((aligned(64)));

static struct shard shards[SHARDS];

/* Handles and pointers differ in their middle bits; a multiplication spreads those over all. */
static uint64_t hash(enum kind kind, uint64_t key) {
    uint64_t mixed = (key + kind) * 0x9e3779b97f4a7c15u;
    return mixed ^ (mixed >> 32);
}

static struct shard *shard_of(uint64_t h) {
    return &shards[h >> 58];
}

/* Where the key is, or where it would go. The table is never full. */
static struct allocation *locate(struct shard *s, uint64_t h, enum kind kind, uint64_t key) {
    uint32_t mask = s->capacity - 1;
    for (uint32_t i = h & mask;; i = (i + 1) & mask) {
        struct allocation *e = &s->table[i];
        if (e->kind == NOTHING || (e->key == key && e->kind == kind))
            return e;
    }
}

static struct allocation *find(struct shard *s, uint64_t h, enum kind kind, uint64_t key) {
    struct allocation *e = s->capacity ? locate(s, h, kind, key) : NULL;
    return e && e->kind != NOTHING ? e : NULL;
}

static bool grow(struct shard *s) {
    uint32_t capacity = s->capacity ? s->capacity * 2 : FIRST_CAPACITY;
    struct allocation *table = os_alloc_pages(capacity * sizeof *table), *before = s->table;
    uint32_t count = s->capacity;
    if (!table)
        return false;
    s->table = table;
    s->capacity = capacity;
    for (uint32_t i = 0; i < count; i++)
        if (before[i].kind != NOTHING)
            *locate(s, hash(before[i].kind, before[i].key), before[i].kind, before[i].key) = before[i];
    if (before)
        os_unmap(before, count * sizeof *before);
    return true;
}

/* Pulls later entries of the same run into the gap, so that searches never stop short. */
static void erase(struct shard *s, struct allocation *e) {
    uint32_t mask = s->capacity - 1, gap = (uint32_t)(e - s->table);
    for (uint32_t i = (gap + 1) & mask; s->table[i].kind != NOTHING; i = (i + 1) & mask) {
        uint32_t home = hash(s->table[i].kind, s->table[i].key) & mask;
        if (((i - home) & mask) < ((i - gap) & mask))
            continue;
        s->table[gap] = s->table[i];
        gap = i;
    }
    s->table[gap].kind = NOTHING;
    s->count--;
}

bool allocations_put(struct allocation new, struct allocation *old) {
    uint64_t h = hash(new.kind, new.key);
    struct shard *s = shard_of(h);
    old->kind = NOTHING;
    os_lock(&s->lock);
    bool room = s->count * 2 < s->capacity || grow(s);
    if (room) {
        struct allocation *e = locate(s, h, new.kind, new.key);
        s->count += e->kind == NOTHING;
        *old = *e;
        *e = new;
    }
    os_unlock(&s->lock);
    return room;
}

bool allocations_find(enum kind kind, uint64_t key, struct allocation *out) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, kind, key);
    if (e)
        *out = *e;
    os_unlock(&s->lock);
    return e != NULL;
}

bool allocations_retain(enum kind kind, uint64_t key) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, kind, key);
    if (e)
        e->references++;
    os_unlock(&s->lock);
    return e != NULL;
}

void allocations_count_launch(uint64_t graph) {
    uint64_t h = hash(GRAPH, graph);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, GRAPH, graph);
    if (e)
        e->bytes++;
    os_unlock(&s->lock);
}

void allocations_node_freed(uint64_t node, uint32_t launches) {
    uint64_t h = hash(NODE, node);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, NODE, node);
    if (e)
        e->references = launches + 1;
    os_unlock(&s->lock);
}

bool allocations_export(enum kind kind, uint64_t key, struct allocation *out) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, kind, key);
    bool first = e && e->shared == OWN;
    if (first) {
        e->shared = EXPORTED;
        *out = *e;
    }
    os_unlock(&s->lock);
    return first;
}

uint64_t allocations_set_export_lock(uint64_t key, uint64_t mark) {
    uint64_t h = hash(BLOCK, key), holds = 0;
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, BLOCK, key);
    if (e && e->shared == EXPORTED)
        holds = e->owner = mark == NO_EXPORT_LOCK || !e->owner ? mark : e->owner;
    os_unlock(&s->lock);
    return holds;
}

void allocations_mark_seen(uint64_t mark, uint32_t pass) {
    uint64_t h = hash(LEFT, mark);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, LEFT, mark);
    if (e)
        e->references = pass;
    os_unlock(&s->lock);
}

uint64_t allocations_grow(uint64_t key, uint8_t card, uint64_t bytes) {
    uint64_t h = hash(BLOCK, key), grown = 0;
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, BLOCK, key);
    if (e && e->shared == IMPORTED && e->bytes < bytes) {
        grown = bytes - e->bytes;
        e->bytes = bytes;
        e->card = card;
    }
    os_unlock(&s->lock);
    return grown;
}

static inline bool drop(enum kind kind, uint64_t key, bool all, struct allocation *gone) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *e = find(s, h, kind, key);
    bool last = e && (all || --e->references == 0);
    if (last) {
        *gone = *e;
        erase(s, e);
    }
    os_unlock(&s->lock);
    return last;
}

bool allocations_release(enum kind kind, uint64_t key, struct allocation *gone) {
    return drop(kind, key, false, gone);
}

bool allocations_take(enum kind kind, uint64_t key, struct allocation *gone) {
    return drop(kind, key, true, gone);
}

static bool owned(const struct allocation *e, uint64_t owner) {
    return e->owner == owner && e->kind >= POINTER && e->kind <= NODE;
}

static bool unseen(const struct allocation *e, uint64_t pass) {
    return e->kind == LEFT && e->references != pass;
}

static bool take_first(struct shard *s, bool (*fits)(const struct allocation *, uint64_t), uint64_t what,
                       struct allocation *gone) {
    for (uint32_t i = 0; i < s->capacity; i++)
        if (fits(&s->table[i], what)) {
            *gone = s->table[i];
            erase(s, &s->table[i]);
            return true;
        }
    return false;
}

static bool take_each(unsigned *shard, bool (*fits)(const struct allocation *, uint64_t), uint64_t what,
                      struct allocation *gone) {
    bool found = false;
    while (!found && *shard < SHARDS) {
        struct shard *s = &shards[*shard];
        os_lock(&s->lock);
        found = take_first(s, fits, what, gone);
        os_unlock(&s->lock);
        *shard += !found;
    }
    return found;
}

bool allocations_take_owned(unsigned *shard, uint64_t owner, struct allocation *gone) {
    return take_each(shard, owned, owner, gone);
}

bool allocations_take_unseen(unsigned *shard, uint32_t pass, struct allocation *gone) {
    return take_each(shard, unseen, pass, gone);
}

/* The tables' pages are given up, not freed: a lock may have been held in the middle of a change. */
void allocations_reset(void) {
    memset(shards, 0, sizeof shards);
}
