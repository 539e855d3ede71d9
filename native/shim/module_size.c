/* Parses cubins, PTX and fat binaries as far as needed to sum what they take of a card. The driver gets only a pointer
 * and trusts the sizes that an image states, and so does this file. Sums saturate. */
#include "module_size.h"

#include <elf.h>
#include <string.h>

#define MACHINE_CUDA 190
#define CUBIN 0x464c457f
#define FAT_WRAPPER 0x466243b1
#define FAT_BINARY 0xba55ed50

static uint64_t plus(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* Byte by byte, because a text may end before the fourth. */
static bool has_magic(const void *image, size_t size, uint32_t magic) {
    const unsigned char *bytes = image;
    for (unsigned i = 0; i < 4; i++)
        if (i >= size || bytes[i] != (unsigned char)(magic >> 8 * i))
            return false;
    return true;
}

static bool begins(const char *text, const char *start) { return !strncmp(text, start, strlen(start)); }

/* --- cubins ---------------------------------------------------------------------------------------------- */

static bool is_loaded(const Elf64_Shdr *s, const char *name, bool lazily) {
    if (!(s->sh_flags & SHF_ALLOC) || (s->sh_type != SHT_PROGBITS && s->sh_type != SHT_NOBITS))
        return false;
    if (begins(name, ".nv.shared") || begins(name, ".nv.local")) /* of a block, of a thread */
        return false;
    return !lazily || !(begins(name, ".text") || begins(name, ".nv.constant0"));
}

static uint64_t cubin_bytes(const char *image, size_t size, bool lazily) {
    Elf64_Ehdr header;
    Elf64_Shdr names, section;
    uint64_t total = 0;
    if (size < sizeof header)
        return 0;
    memcpy(&header, image, sizeof header);
    if (size > MODULE_LARGEST_FILE)
        size = MODULE_LARGEST_FILE;
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != MACHINE_CUDA ||
        header.e_shentsize != sizeof section || header.e_shstrndx >= header.e_shnum)
        return MODULE_SIZE_UNKNOWN;
    if (header.e_shoff > size || header.e_shnum > (size - header.e_shoff) / sizeof section)
        return 0;
    memcpy(&names, image + header.e_shoff + header.e_shstrndx * sizeof section, sizeof names);
    if (names.sh_offset > size || names.sh_size > size - names.sh_offset || names.sh_size == 0 ||
        image[names.sh_offset + names.sh_size - 1])
        return 0;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_name < names.sh_size && is_loaded(&section, image + names.sh_offset + section.sh_name, lazily))
            total = plus(total, section.sh_size);
    }
    return total;
}

/* --- PTX ------------------------------------------------------------------------------------------------- */

struct words {
    const char *at, *end;
    const char *word; /* the one just read: a name, number or directive, or one other character */
    size_t length;
};

static bool in_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
           c == '.' || c == '%';
}

static void skip_to(struct words *w, const char *stop) {
    size_t length = strlen(stop);
    while ((size_t)(w->end - w->at) >= length && memcmp(w->at, stop, length))
        w->at++;
    w->at = (size_t)(w->end - w->at) >= length ? w->at + length : w->end;
}

static bool next_word(struct words *w) {
    while (w->at < w->end) {
        char c = *w->at, after = w->end - w->at > 1 ? w->at[1] : 0;
        if (c == '/' && after == '/')
            skip_to(w, "\n");
        else if (c == '/' && after == '*')
            skip_to(w, "*/");
        else if (c == '"') {
            w->at++;
            skip_to(w, "\"");
        } else if (c == ' ' || (c >= '\t' && c <= '\r'))
            w->at++;
        else
            break;
    }
    if (w->at == w->end)
        return false;
    w->word = w->at++;
    while (in_word(*w->word) && w->at < w->end && in_word(*w->at))
        w->at++;
    w->length = (size_t)(w->at - w->word);
    return true;
}

static bool is(const struct words *w, const char *text) {
    return w->length == strlen(text) && !memcmp(w->word, text, w->length);
}

static uint64_t number(const char **at, const char *end) {
    unsigned base = 10;
    uint64_t value = 0;
    if (end - *at > 2 && **at == '0' && ((*at)[1] | 32) == 'x') {
        base = 16;
        *at += 2;
    }
    for (; *at < end; ++*at) {
        unsigned digit = **at >= '0' && **at <= '9'                 ? (unsigned)(**at - '0')
                         : (**at | 32) >= 'a' && (**at | 32) <= 'f' ? (unsigned)((**at | 32) - 'a' + 10)
                                                                    : 16;
        if (digit >= base)
            break;
        value = plus(times(value, base), digit);
    }
    return value;
}

/* ".f32" = 4, ".b8" = 1, ".f16x2" = 4, ".v4" = 4 of what follows; anything else = 0. */
static uint64_t type_bytes(const struct words *w, uint64_t vector) {
    const char *at = w->word + 1, *end = w->word + w->length;
    while (at < end && (*at < '0' || *at > '9'))
        at++;
    uint64_t bits = number(&at, end);
    if (at < end && *at == 'x') {
        at++;
        bits = times(bits, number(&at, end));
    }
    return at == end && bits % 8 == 0 ? times(bits / 8, vector) : 0;
}

/* What one run over an image does with the variables of its PTX. */
struct reading {
    bool lazily, variables;
    variable_size ask; /* or NULL */
    void *to;
};

static uint64_t variable_bytes(struct reading *reading, const struct ptx_variable *variable) {
    reading->variables = true;
    if (reading->ask)
        return reading->ask(reading->to, variable);
    return variable->plain ? variable->bytes : plus(variable->bytes, MODULE_SIZE_UNKNOWN);
}

/* The number up to `stop`; false if there is anything else, such as an expression, or an octal or binary number. */
static bool plain_number(struct words *w, const char *stop, uint64_t *value) {
    const char *at = w->word, *end = w->word + w->length;
    bool octal = w->length > 1 && *at == '0' && (at[1] | 32) != 'x';
    *value = number(&at, end);
    at += at < end && *at == 'U';
    return !octal && w->length && at == end && next_word(w) && is(w, stop);
}

/* From behind ".global" or ".const" to the semicolon: ".align 4 .v2 .f32 a[2][3], b[] = {1, 2}, c<100>". An array
 * without a number has as many elements as there are first values. */
static uint64_t declared_bytes(struct words *w, struct reading *reading) {
    struct ptx_variable variable = {.plain = true};
    uint64_t type = 0, vector = 1, total = 0, elements = 0, values = 0, length;
    bool counted = false, assigned = false, more = true;
    unsigned braces = 0;
    while (more) {
        more = next_word(w) && !is(w, ";");
        if (!more || (!braces && is(w, ","))) {
            variable.bytes = times(type, counted ? elements : values);
            total = variable.name ? plus(total, variable_bytes(reading, &variable)) : total;
            variable = (struct ptx_variable){.plain = true};
            elements = values = 0;
            assigned = false;
        } else if (is(w, "="))
            assigned = true;
        else if (is(w, "("))
            skip_to(w, ")");
        else if (is(w, ".align"))
            next_word(w);
        else if (is(w, "{"))
            values += !braces++;
        else if (is(w, "}"))
            braces -= braces > 0;
        else if (braces)
            values += is(w, ",");
        else if (!assigned && (is(w, "[") || is(w, "<"))) {
            const char *stop = is(w, "[") ? "]" : ">";
            bool any = next_word(w) && !is(w, stop);
            counted = counted && any;
            if (any && !plain_number(w, stop, &length)) {
                variable.plain = false;
                while (!is(w, stop) && !is(w, ";") && next_word(w))
                    ;
                w->at = is(w, ";") ? w->word : w->at;
            } else if (any)
                elements = times(elements, length);
        } else if (w->length == 3 && begins(w->word, ".v"))
            vector = (uint64_t)(w->word[2] - '0') & 15;
        else if (*w->word == '.')
            type = type_bytes(w, vector);
        else if (in_word(*w->word) && !variable.name) {
            variable.name = w->word;
            variable.name_length = w->length;
            elements = 1;
            counted = true;
        }
    }
    return total;
}

static uint64_t ptx_bytes(const char *text, size_t size, struct reading *reading, bool lazily) {
    size_t length = strnlen(text, size);
    struct words w = {text, text + length, text, 0};
    uint64_t total = lazily ? 0 : length;
    bool elsewhere = false; /* .extern: another image's; .ptr: of a parameter */
    while (next_word(&w)) {
        bool variable = is(&w, ".global") || is(&w, ".const");
        if (variable && !elsewhere)
            total = plus(total, declared_bytes(&w, reading));
        elsewhere = is(&w, ".extern") || is(&w, ".ptr");
    }
    return total;
}

/* --- fat binaries ---------------------------------------------------------------------------------------- */

struct fat {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of the entries together */
};

struct entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* of the image, with padding */
    uint32_t packed_bytes, unused;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_bytes;
    uint64_t flags, zero;
    uint64_t unpacked_bytes; /* 0 = it is not compressed */
};
_Static_assert(sizeof(struct entry) == 64, "as fatbinary writes it");

static uint64_t plain_bytes(const char *image, size_t size, struct reading *reading, bool lazily) {
    if (!size)
        return 0;
    if (has_magic(image, size, CUBIN))
        return cubin_bytes(image, size, lazily);
    bool text = *image == '.' || *image == '/' || (*image >= '\t' && *image <= '\r') || *image == ' ';
    return text ? ptx_bytes(image, size, reading, lazily) : MODULE_SIZE_UNKNOWN;
}

static uint64_t entry_bytes(const struct entry *e, const char *image, struct reading *reading) {
    if (!e->unpacked_bytes)
        return plain_bytes(image, e->bytes, reading, reading->lazily);
    return reading->lazily ? 0 : e->unpacked_bytes;
}

static uint64_t fat_bytes(const char *image, size_t size, struct reading *reading) {
    struct fat fat;
    struct entry entry;
    uint64_t largest = 0;
    memcpy(&fat, image, sizeof fat);
    uint64_t end = plus(fat.header_bytes, fat.bytes);
    if (end > size || end > MODULE_LARGEST_FILE)
        return 0;
    for (uint64_t at = fat.header_bytes; end - at >= sizeof entry;) {
        memcpy(&entry, image + at, sizeof entry);
        if (entry.header_bytes < sizeof entry || entry.header_bytes > end - at ||
            entry.bytes > end - at - entry.header_bytes)
            break;
        uint64_t bytes = entry_bytes(&entry, image + at + entry.header_bytes, reading);
        largest = bytes > largest ? bytes : largest;
        at += entry.header_bytes + entry.bytes;
    }
    return largest;
}

static uint64_t image_bytes(const void *image, size_t size, struct reading *reading) {
    /* A compiler's wrapper in a program: the magic, a version, and a pointer to the fat binary. */
    if (size == MODULE_SIZE_UNBOUNDED && has_magic(image, size, FAT_WRAPPER)) {
        memcpy(&image, (const char *)image + 8, sizeof image);
        if (!image || !has_magic(image, size, FAT_BINARY))
            return MODULE_SIZE_UNKNOWN;
    }
    if (has_magic(image, size, FAT_BINARY))
        return size < sizeof(struct fat) ? 0 : fat_bytes(image, size, reading);
    /* Kernels of a single image may be loaded lazily, too, but are usually all used. */
    return plain_bytes(image, size, reading, false);
}

struct module_size module_size(const void *image, size_t size, bool lazily, variable_size ask, void *to) {
    struct reading reading = {.lazily = lazily, .ask = ask, .to = to};
    uint64_t bytes = image_bytes(image, size, &reading);
    return (struct module_size){bytes, reading.variables};
}
