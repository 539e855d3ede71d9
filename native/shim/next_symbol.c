#define _GNU_SOURCE
#include "next_symbol.h"

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

#include "text.h"

struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash, *sysv_hash;
};

/* glibc has turned these into addresses, musl and the kernel's vDSO have not. */
static const void *pointer(const struct link_map *object, ElfW(Addr) value) {
    return (const void *)(value < object->l_addr ? value + object->l_addr : value);
}

static bool read_tables(const struct link_map *object, struct tables *t) {
    *t = (struct tables){0};
    for (const ElfW(Dyn) *d = object->l_ld; d && d->d_tag != DT_NULL; d++) {
        const void *at = pointer(object, d->d_un.d_ptr);
        if (d->d_tag == DT_SYMTAB)
            t->symbols = at;
        else if (d->d_tag == DT_STRTAB)
            t->strings = at;
        else if (d->d_tag == DT_GNU_HASH)
            t->gnu_hash = at;
        else if (d->d_tag == DT_HASH)
            t->sysv_hash = at;
    }
    return t->symbols && t->strings;
}

static const ElfW(Sym) * matches(const struct tables *t, uint32_t index, const char *name) {
    const ElfW(Sym) *s = &t->symbols[index];
    return s->st_shndx != SHN_UNDEF && text_equal(t->strings + s->st_name, name) ? s : NULL;
}

static const ElfW(Sym) * by_gnu_hash(const struct tables *t, const char *name) {
    const uint32_t *h = t->gnu_hash, buckets = h[0], first = h[1];
    const uint32_t *bucket = h + 4 + h[2] * (sizeof(ElfW(Addr)) / 4), *chain = bucket + buckets;
    uint32_t hash = 5381;
    for (const char *c = name; *c; c++)
        hash = hash * 33 + (unsigned char)*c;
    uint32_t i = buckets ? bucket[hash % buckets] : 0;
    if (i < first)
        return NULL;
    for (;; i++) {
        uint32_t entry = chain[i - first];
        const ElfW(Sym) *s = (entry | 1) == (hash | 1) ? matches(t, i, name) : NULL;
        if (s || (entry & 1))
            return s;
    }
}

static const ElfW(Sym) * by_scan(const struct tables *t, const char *name) {
    for (uint32_t i = 0; i < t->sysv_hash[1]; i++)
        if (matches(t, i, name))
            return &t->symbols[i];
    return NULL;
}

static void *defined_in(const struct link_map *object, const char *name) {
    struct tables t;
    if (!read_tables(object, &t))
        return NULL;
    const ElfW(Sym) *s = t.gnu_hash ? by_gnu_hash(&t, name) : t.sysv_hash ? by_scan(&t, name) : NULL;
    return s ? (void *)(object->l_addr + s->st_value) : NULL;
}

/* The dynamic linker's list for debuggers, by glibc's name and by musl's. Sanitizers replace dl_iterate_phdr, and
 * theirs does not work before they have called dlsym. The list is read without a lock: this runs before the program
 * starts, when no other thread loads anything. */
extern struct r_debug _r_debug __attribute__((weak));
extern struct r_debug *_dl_debug_addr __attribute__((weak));
extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden"))); /* this library's own */

void *next_symbol(const char *symbol) {
    const struct r_debug *linker = &_r_debug ? &_r_debug : &_dl_debug_addr ? _dl_debug_addr : NULL;
    void *before = NULL, *after = NULL;
    bool past_us = false;
    for (const struct link_map *o = linker ? linker->r_map : NULL; o && !after; o = o->l_next) {
        if (o->l_ld == _DYNAMIC)
            past_us = true;
        else if (past_us)
            after = defined_in(o, symbol);
        else if (!before)
            before = defined_in(o, symbol);
    }
    return after ? after : before;
}
