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

/* Handles and pointers differ in their middle bits; the multiplication spreads those over all bits. */
static uint64_t hash(enum kind kind, uint64_t key) {
    uint64_t mixed = (key + kind) * 0x9e3779b97f4a7c15u;
    return mixed ^ (mixed >> 32);
}

static struct shard *shard_of(uint64_t h) { return &shards[h >> 58]; }

/* Returns the key's entry, or the free entry where it would be stored. The table is never full. */
static struct allocation *locate(struct shard *s, uint64_t h, enum kind kind, uint64_t key) {
    uint32_t mask = s->capacity - 1;
    for (uint32_t i = h & mask;; i = (i + 1) & mask) {
        struct allocation *entry = &s->table[i];
        if (entry->kind == NOTHING || (entry->key == key && entry->kind == kind))
            return entry;
    }
}

static struct allocation *find(struct shard *s, uint64_t h, enum kind kind, uint64_t key) {
    struct allocation *entry = s->capacity ? locate(s, h, kind, key) : NULL;
    return entry && entry->kind != NOTHING ? entry : NULL;
}

static bool grow(struct shard *s) {
    uint32_t capacity = s->capacity ? s->capacity * 2 : FIRST_CAPACITY;
    struct allocation *table = os_alloc_pages(capacity * sizeof *table), *old_table = s->table;
    uint32_t old_capacity = s->capacity;
    if (!table)
        return false;
    s->table = table;
    s->capacity = capacity;
    for (uint32_t i = 0; i < old_capacity; i++)
        if (old_table[i].kind != NOTHING)
            *locate(s, hash(old_table[i].kind, old_table[i].key), old_table[i].kind, old_table[i].key) = old_table[i];
    if (old_table)
        os_unmap(old_table, old_capacity * sizeof *old_table);
    return true;
}

/* Moves later entries of the same run into the gap, so that searches do not stop early. */
static void erase(struct shard *s, struct allocation *entry) {
    uint32_t mask = s->capacity - 1, gap = (uint32_t)(entry - s->table);
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
        struct allocation *entry = locate(s, h, new.kind, new.key);
        s->count += entry->kind == NOTHING;
        *old = *entry;
        *entry = new;
    }
    os_unlock(&s->lock);
    return room;
}

bool allocations_find(enum kind kind, uint64_t key, struct allocation *out) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, kind, key);
    if (entry)
        *out = *entry;
    os_unlock(&s->lock);
    return entry != NULL;
}

bool allocations_retain(enum kind kind, uint64_t key) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, kind, key);
    if (entry)
        entry->references++;
    os_unlock(&s->lock);
    return entry != NULL;
}

void allocations_count_launch(uint64_t graph) {
    uint64_t h = hash(GRAPH, graph);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, GRAPH, graph);
    if (entry)
        entry->bytes++;
    os_unlock(&s->lock);
}

void allocations_node_freed(uint64_t node, uint32_t launches) {
    uint64_t h = hash(NODE, node);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, NODE, node);
    if (entry)
        entry->references = launches + 1;
    os_unlock(&s->lock);
}

bool allocations_export(enum kind kind, uint64_t key, struct allocation *out) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, kind, key);
    bool first = entry && entry->shared == OWN;
    if (first) {
        entry->shared = EXPORTED;
        *out = *entry;
    }
    os_unlock(&s->lock);
    return first;
}

uint64_t allocations_set_export_lock(uint64_t key, uint64_t first_byte) {
    uint64_t h = hash(BLOCK, key), result = 0;
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, BLOCK, key);
    if (entry && entry->shared == EXPORTED)
        result = entry->owner = first_byte == NO_EXPORT_LOCK || !entry->owner ? first_byte : entry->owner;
    os_unlock(&s->lock);
    return result;
}

void allocations_mark_seen(uint64_t first_byte, uint32_t pass) {
    uint64_t h = hash(DEFERRED, first_byte);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, DEFERRED, first_byte);
    if (entry)
        entry->references = pass;
    os_unlock(&s->lock);
}

uint64_t allocations_grow(uint64_t key, uint8_t card, uint64_t bytes) {
    uint64_t h = hash(BLOCK, key), grown = 0;
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, BLOCK, key);
    if (entry && entry->shared == IMPORTED && entry->bytes < bytes) {
        grown = bytes - entry->bytes;
        entry->bytes = bytes;
        entry->card = card;
    }
    os_unlock(&s->lock);
    return grown;
}

static inline bool drop(enum kind kind, uint64_t key, bool all, struct allocation *taken) {
    uint64_t h = hash(kind, key);
    struct shard *s = shard_of(h);
    os_lock(&s->lock);
    struct allocation *entry = find(s, h, kind, key);
    bool last = entry && (all || --entry->references == 0);
    if (last) {
        *taken = *entry;
        erase(s, entry);
    }
    os_unlock(&s->lock);
    return last;
}

bool allocations_release(enum kind kind, uint64_t key, struct allocation *taken) {
    return drop(kind, key, false, taken);
}

bool allocations_take(enum kind kind, uint64_t key, struct allocation *taken) { return drop(kind, key, true, taken); }

static bool owned(const struct allocation *entry, uint64_t owner) {
    return entry->owner == owner && entry->kind >= POINTER && entry->kind <= NODE;
}

static bool unseen(const struct allocation *entry, uint64_t pass) {
    return entry->kind == DEFERRED && entry->references != pass;
}

static bool take_first(struct shard *s, bool (*matches)(const struct allocation *, uint64_t), uint64_t argument,
                       struct allocation *taken) {
    for (uint32_t i = 0; i < s->capacity; i++)
        if (matches(&s->table[i], argument)) {
            *taken = s->table[i];
            erase(s, &s->table[i]);
            return true;
        }
    return false;
}

static bool take_each(unsigned *shard, bool (*matches)(const struct allocation *, uint64_t), uint64_t argument,
                      struct allocation *taken) {
    bool any = false;
    while (!any && *shard < SHARDS) {
        struct shard *s = &shards[*shard];
        os_lock(&s->lock);
        any = take_first(s, matches, argument, taken);
        os_unlock(&s->lock);
        *shard += !any;
    }
    return any;
}

bool allocations_take_owned(unsigned *shard, uint64_t owner, struct allocation *taken) {
    return take_each(shard, owned, owner, taken);
}

bool allocations_take_unseen(unsigned *shard, uint32_t pass, struct allocation *taken) {
    return take_each(shard, unseen, pass, taken);
}

/* The pages of the tables are leaked: another thread of the parent may have been changing them during the fork. */
void allocations_reset(void) { memset(shards, 0, sizeof shards); }
