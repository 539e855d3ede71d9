/* What an image defines: kernels with the layout of their arguments, and variables. A packed fat binary does not say. */
#include <ctype.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image_size.h"

#define CUDA_ENTRY 0x10 /* in st_other: a kernel */
/* Records of `.nv.info.NAME`: only this format has as many bytes behind it as it says. */
#define INFO_SIZED 0x04
#define INFO_ARGUMENT 0x17

static struct image_function *function(struct image_names *names, const char *name) {
    struct image_function *known = names->functions;
    while (known && strcmp(known->name, name) != 0)
        known = known->next;
    if (known)
        return known;
    struct image_function *made = calloc(1, sizeof *made + strlen(name) + 1);
    if (!made)
        return NULL;
    strcpy(made->name, name);
    made->next = names->functions;
    names->functions = made;
    return made;
}

static void variable(struct image_names *names, const char *name, uint64_t bytes) {
    struct image_variable *made = malloc(sizeof *made + strlen(name) + 1);
    if (!made)
        return;
    strcpy(made->name, name);
    made->bytes = bytes;
    made->next = names->variables;
    names->variables = made;
}

/* ---- cubins ---- */

struct sections {
    const char *image;
    size_t size;
    Elf64_Shdr *all;
    unsigned count;
    const char *names;
    size_t names_size;
};

static bool inside(const struct sections *in, const Elf64_Shdr *section) {
    return section->sh_type != SHT_NOBITS && section->sh_offset <= in->size &&
           section->sh_size <= in->size - section->sh_offset;
}

static bool open_sections(struct sections *in, const char *image, size_t size) {
    Elf64_Ehdr header;
    if (size < sizeof header)
        return false;
    memcpy(&header, image, sizeof header);
    *in = (struct sections){.image = image, .size = size, .count = header.e_shnum};
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr) || header.e_shoff > size ||
        header.e_shnum > (size - header.e_shoff) / sizeof(Elf64_Shdr) || header.e_shstrndx >= header.e_shnum)
        return false;
    in->all = malloc(in->count * sizeof *in->all); /* in the image they may lie at any address */
    if (!in->all)
        return false;
    memcpy(in->all, image + header.e_shoff, in->count * sizeof *in->all);
    const Elf64_Shdr *strings = &in->all[header.e_shstrndx];
    if (!inside(in, strings))
        return false;
    in->names = image + strings->sh_offset;
    in->names_size = strings->sh_size;
    return true;
}

/* A text of a table of strings, or "" where it is not terminated. */
static const char *text_at(const char *table, size_t size, size_t at) {
    return at < size && memchr(table + at, '\0', size - at) ? table + at : "";
}

static void read_symbols(const struct sections *in, const Elf64_Shdr *table, struct image_names *names) {
    if (!inside(in, table) || table->sh_link >= in->count || !inside(in, &in->all[table->sh_link]))
        return;
    const Elf64_Shdr *strings = &in->all[table->sh_link];
    for (size_t at = 0; table->sh_size - at >= sizeof(Elf64_Sym); at += sizeof(Elf64_Sym)) {
        Elf64_Sym symbol;
        memcpy(&symbol, in->image + table->sh_offset + at, sizeof symbol);
        const char *name = text_at(in->image + strings->sh_offset, strings->sh_size, symbol.st_name);
        bool global = ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL || ELF64_ST_BIND(symbol.st_info) == STB_WEAK;
        if (!*name || symbol.st_shndx == SHN_UNDEF)
            continue;
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_other & CUDA_ENTRY)
            function(names, name);
        else if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT && global)
            variable(names, name, symbol.st_size);
    }
}

/* One argument: its index, ordinal, offset, and a word whose upper 14 bits are its size. */
static void read_argument(struct image_function *kernel, const char *record) {
    uint16_t ordinal, offset;
    uint32_t packed;
    memcpy(&ordinal, record + 4, sizeof ordinal);
    memcpy(&offset, record + 6, sizeof offset);
    memcpy(&packed, record + 8, sizeof packed);
    if (ordinal >= IMAGE_ARGUMENTS)
        return;
    kernel->each[ordinal].offset = offset;
    kernel->each[ordinal].size = packed >> 18;
    if (ordinal >= kernel->count)
        kernel->count = ordinal + 1u;
}

static void read_info(const struct sections *in, const Elf64_Shdr *section, struct image_function *kernel) {
    const char *data = in->image + section->sh_offset;
    for (size_t at = 0; section->sh_size - at >= 4;) {
        uint8_t format = (uint8_t)data[at], attribute = (uint8_t)data[at + 1];
        uint16_t bytes;
        memcpy(&bytes, data + at + 2, sizeof bytes);
        at += 4;
        if (format != INFO_SIZED)
            continue;
        if (bytes > section->sh_size - at)
            return;
        if (attribute == INFO_ARGUMENT && bytes >= 12)
            read_argument(kernel, data + at);
        at += bytes;
    }
}

static void cubin_names(const char *image, size_t size, struct image_names *names) {
    struct sections in = {0};
    bool symbols = false;
    if (!open_sections(&in, image, size)) {
        free(in.all);
        return;
    }
    for (unsigned i = 0; i < in.count; i++)
        if (in.all[i].sh_type == SHT_SYMTAB) {
            read_symbols(&in, &in.all[i], names);
            symbols = true;
        }
    names->complete = symbols;
    for (unsigned i = 0; i < in.count; i++) {
        const char *name = text_at(in.names, in.names_size, in.all[i].sh_name);
        if (strncmp(name, ".nv.info.", 9) != 0 || !inside(&in, &in.all[i]))
            continue;
        for (struct image_function *kernel = names->functions; kernel; kernel = kernel->next)
            if (strcmp(kernel->name, name + 9) == 0)
                read_info(&in, &in.all[i], kernel);
    }
    free(in.all);
}

/* ---- PTX ---- */

static size_t word(const char *at, char *out, size_t room) {
    size_t length = 0, skipped = strspn(at, " \t\r\n");
    at += skipped;
    while (isalnum((unsigned char)at[length]) || (at[length] && strchr("_$.%", at[length])))
        length++;
    snprintf(out, room, "%.*s", (int)(length < room ? length : room - 1), at);
    return skipped + length;
}

static uint32_t bytes_of(const char *type) {
    const char *digits = type + strcspn(type, "0123456789");
    return (uint32_t)strtoul(digits, NULL, 10) / 8;
}

/* From behind "(" on, to ")": `.param .align 8 .b8 name[24], .param .u64 .ptr .global name`. */
static void ptx_arguments(const char *at, struct image_function *kernel) {
    const char *end = at + strcspn(at, ")");
    uint32_t offset = 0;
    kernel->count = 0;
    while (at < end && kernel->count < IMAGE_ARGUMENTS) {
        uint32_t align = 0, size = 0, count = 1;
        const char *stop = at + strcspn(at, ",)");
        char token[1024] = "";
        bool pointer = false;
        while (at < stop) {
            size_t taken = word(at, token, sizeof token);
            at += taken;
            if (strcmp(token, ".align") == 0 && !pointer)
                align = (uint32_t)strtoul(at, NULL, 10);
            pointer = pointer || strcmp(token, ".ptr") == 0;
            if (token[0] == '.' && strchr("bsuf", token[1]) && isdigit((unsigned char)token[2]))
                size = bytes_of(token);
            if (*at == '[')
                count = (uint32_t)strtoul(at + 1, NULL, 10);
            if (taken == 0 || *at == '[')
                at++;
        }
        if (size == 0)
            return;
        align = align ? align : size;
        offset = (offset + align - 1) / align * align;
        kernel->each[kernel->count].offset = offset;
        kernel->each[kernel->count++].size = size * count;
        offset += size * count;
        at = stop + 1;
    }
}

static void ptx_names(const char *text, size_t length, struct image_names *names) {
    char *plain = image_without_comments(text, length), name[4096];
    names->complete = plain;
    for (const char *at = plain; at && (at = strstr(at, ".entry"));) {
        at += strlen(".entry");
        if (!isspace((unsigned char)*at))
            continue;
        at += word(at, name, sizeof name);
        struct image_function *kernel = *name ? function(names, name) : NULL;
        at += strspn(at, " \t\r\n");
        if (kernel && *at == '(')
            ptx_arguments(at + 1, kernel);
    }
    free(plain);
}

/* ---- fat binaries ---- */

static void fat_names(const char *image, struct image_names *names) {
    uint16_t header;
    uint64_t rest;
    bool packed = false;
    memcpy(&header, image + 6, sizeof header);
    memcpy(&rest, image + 8, sizeof rest);
    for (const char *at = image + header, *end = at + rest; end - at >= 64;) {
        uint32_t before;
        uint64_t bytes, unpacked;
        memcpy(&before, at + 4, sizeof before);
        memcpy(&bytes, at + 8, sizeof bytes);
        memcpy(&unpacked, at + 56, sizeof unpacked);
        if (before < 64 || before > end - at || bytes > (uint64_t)(end - at) - before)
            break;
        if (unpacked)
            packed = true;
        else
            image_names(at + before, bytes, names);
        at += before + bytes;
    }
    names->complete = names->complete && !packed;
}

void image_names(const void *image, size_t size, struct image_names *names) {
    const char *text = image;
    if (size == SIZE_MAX && strncmp(text, "\xb1\x43\x62\x46", 4) == 0) { /* a compiler's wrapper */
        memcpy(&text, text + 8, sizeof text);
        fat_names(text, names);
    } else if (strncmp(text, "\x50\xed\x55\xba", 4) == 0) {
        fat_names(text, names);
    } else if (strncmp(text, "\177ELF", 4) == 0) {
        cubin_names(text, size, names);
    } else if (*text == '.' || *text == '/' || isspace((unsigned char)*text)) {
        ptx_names(text, strnlen(text, size), names);
    }
}

void image_names_free(struct image_names *names) {
    for (struct image_function *kernel = names->functions, *next; kernel; kernel = next) {
        next = kernel->next;
        free(kernel);
    }
    image_variables_free(names->variables);
    *names = (struct image_names){0};
}
