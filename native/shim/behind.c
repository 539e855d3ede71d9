#define _GNU_SOURCE
#include "behind.h"

#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash, *sysv_hash;
};

struct search {
    const char *symbol;
    bool past_us, after_us;
    void *found;
};

static bool is_us(const struct dl_phdr_info *object) {
    uintptr_t here = (uintptr_t)&behind_us - object->dlpi_addr;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &object->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && here - p->p_vaddr < p->p_memsz)
            return true;
    }
    return false;
}

/* glibc has turned these into addresses, musl and the kernel's vDSO have not. */
static const void *pointer(const struct dl_phdr_info *object, ElfW(Addr) value) {
    return (const void *)(value < object->dlpi_addr ? value + object->dlpi_addr : value);
}

static bool read_tables(const struct dl_phdr_info *object, struct tables *t) {
    const ElfW(Dyn) *d = NULL;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            d = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    memset(t, 0, sizeof *t);
    for (; d && d->d_tag != DT_NULL; d++) {
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
    return s->st_shndx != SHN_UNDEF && !strcmp(t->strings + s->st_name, name) ? s : NULL;
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

static int visit(struct dl_phdr_info *object, size_t size, void *argument) {
    struct search *search = argument;
    struct tables t;
    (void)size;
    if (is_us(object)) {
        search->past_us = true;
        return 0;
    }
    if (search->after_us != search->past_us || !read_tables(object, &t))
        return 0;
    const ElfW(Sym) *s = t.gnu_hash    ? by_gnu_hash(&t, search->symbol)
                         : t.sysv_hash ? by_scan(&t, search->symbol)
                                       : NULL;
    if (s)
        search->found = (void *)(object->dlpi_addr + s->st_value);
    return s != NULL;
}

void *behind_us(const char *symbol) {
    struct search after = {.symbol = symbol, .after_us = true}, before = {.symbol = symbol};
    dl_iterate_phdr(visit, &after);
    if (!after.found)
        dl_iterate_phdr(visit, &before);
    return after.found ? after.found : before.found;
}
