#include "image_size.h"

#include <ctype.h>
#include <elf.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Beyond 64 bits: more than any card has. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t plus(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

/* ---- PTX: a text without comments, read from left to right ---- */

char *image_without_comments(const char *text, size_t length) {
    char *plain = calloc(length + 1, 1), *to = plain;
    for (size_t i = 0; plain && i < length;) {
        const char *end = NULL;
        if (length - i > 1 && text[i] == '/' && text[i + 1] == '/')
            end = memchr(text + i, '\n', length - i);
        else if (length - i > 1 && text[i] == '/' && text[i + 1] == '*')
            end = strstr(text + i + 2, "*/");
        else {
            *to++ = text[i++];
            continue;
        }
        *to++ = ' ';
        i = !end ? length : (size_t)(end - text) + (*end == '*' ? 2 : 1);
    }
    return plain;
}

static void skip_spaces(const char **at) {
    while (isspace((unsigned char)**at))
        ++*at;
}

static bool take(const char **at, const char *token) {
    skip_spaces(at);
    size_t length = strlen(token);
    if (strncmp(*at, token, length) != 0)
        return false;
    *at += length;
    return true;
}

/* Operators by precedence; a longer one comes before its beginning. */
static const struct {
    const char *token;
    int precedence;
} operators[] = {{"<<", 4}, {">>", 4}, {"<=", 3}, {">=", 3}, {"==", 2}, {"!=", 2}, {"&&", 0}, {"||", 0}, {"<", 3},
                 {">", 3},  {"+", 5},  {"-", 5},  {"*", 6},  {"/", 6},  {"%", 6},  {"&", 1},  {"^", 1},  {"|", 1}};

static uint64_t apply(const char *token, uint64_t a, uint64_t b) {
    switch (token[0]) {
    case '<':
        return token[1] == '<' ? (b < 64 ? a << b : 0) : token[1] ? a <= b : a < b;
    case '>':
        return token[1] == '>' ? (b < 64 ? a >> b : 0) : token[1] ? a >= b : a > b;
    case '=':
        return a == b;
    case '!':
        return a != b;
    case '+':
        return a + b;
    case '-':
        return a - b;
    case '*':
        return a * b;
    case '/':
        return b ? a / b : 0;
    case '%':
        return b ? a % b : 0;
    case '&':
        return token[1] ? a && b : (a & b);
    case '^':
        return a ^ b;
    default:
        return token[1] ? a || b : (a | b);
    }
}

static uint64_t expression(const char **at, int least);

static uint64_t operand(const char **at) {
    if (take(at, "(")) {
        uint64_t value = expression(at, 0);
        take(at, ")");
        return value;
    }
    if (take(at, "-"))
        return -operand(at);
    if (take(at, "~"))
        return ~operand(at);
    if (take(at, "!"))
        return !operand(at);
    char *end;
    bool binary = (*at)[0] == '0' && ((*at)[1] | 32) == 'b';
    uint64_t value = strtoull(binary ? *at + 2 : *at, &end, binary ? 2 : 0);
    *at = end + (*end == 'U');
    return value;
}

static uint64_t expression(const char **at, int least) {
    uint64_t value = operand(at);
    for (;;) {
        const char *start = *at;
        size_t i = 0, count = sizeof operators / sizeof *operators;
        while (i < count && !take(at, operators[i].token))
            i++;
        if (i == count || operators[i].precedence < least) {
            *at = start;
            return value;
        }
        value = apply(operators[i].token, value, expression(at, operators[i].precedence + 1));
    }
}

/* "f32", "b8", "f16x2"; 0 = it is not a type with a size. */
static uint64_t type_size(const char *name) {
    const char *digits = name + strcspn(name, "0123456789");
    char *end;
    uint64_t bits = strtoull(digits, &end, 10);
    if (*end == 'x')
        bits *= strtoull(end + 1, &end, 10);
    return digits == end || bits % 8 ? 0 : bits / 8;
}

static void read_word(const char **at, char *word, size_t room) {
    size_t length = 0;
    for (; isalnum((unsigned char)**at) || (**at && strchr("_$.%", **at)); ++*at)
        if (length + 1 < room)
            word[length++] = **at;
    word[length] = '\0';
}

/* Behind "=": how many values there are on all levels. */
static uint64_t initializer(const char **at) {
    uint64_t values = 0;
    int depth = 0;
    for (; **at && (depth > 0 || (**at != ',' && **at != ';')); ++*at) {
        values += depth > 0 ? **at == ',' : **at == '{';
        depth += (**at == '{') - (**at == '}');
    }
    return values;
}

static void add(struct image_variable **variables, const char *name, uint64_t bytes) {
    struct image_variable *made = malloc(sizeof *made + strlen(name) + 1);
    if (!made)
        return;
    made->bytes = bytes;
    made->next = *variables;
    strcpy(made->name, name);
    *variables = made;
}

/* One variable, from its name on. */
static uint64_t declarator(const char **at, uint64_t type, struct image_variable **variables) {
    char name[4096];
    uint64_t count = 1, values = 0;
    bool open = false;
    skip_spaces(at);
    read_word(at, name, sizeof name);
    if (take(at, "<")) {
        count = expression(at, 4); /* not the comparison that ">" would be */
        take(at, ">");
    }
    while (take(at, "[")) {
        if (take(at, "]")) {
            open = true;
            continue;
        }
        count = times(count, expression(at, 0));
        take(at, "]");
    }
    if (take(at, "="))
        values = initializer(at);
    uint64_t bytes = times(type, open ? values : count);
    add(variables, name, bytes);
    return bytes;
}

/* Behind ".global" or ".const". */
static uint64_t declaration(const char **at, struct image_variable **variables) {
    uint64_t type = 0, vector = 1, total = 0;
    char word[64];
    while (skip_spaces(at), **at == '.') {
        ++*at;
        read_word(at, word, sizeof word);
        if (strcmp(word, "align") == 0)
            expression(at, 0);
        else if (strcmp(word, "attribute") == 0)
            *at += strcspn(*at, ")") + 1;
        else if (word[0] == 'v' && isdigit((unsigned char)word[1]))
            vector = strtoull(word + 1, NULL, 10);
        else
            type = type_size(word) * vector;
    }
    do
        total = plus(total, declarator(at, type, variables));
    while (take(at, ","));
    return total;
}

static uint64_t ptx_size(const char *text, size_t length, struct image_variable **variables) {
    char *plain = image_without_comments(text, length), word[4096];
    uint64_t total = plain ? length : 0;
    bool skipped = false; /* .extern: in another image; .ptr: of a parameter */
    for (const char *at = plain; plain && *at;) {
        const char *begin = at;
        read_word(&at, word, sizeof word);
        if (at == begin) {
            if (!isspace((unsigned char)*at))
                skipped = false;
            at++;
            continue;
        }
        if ((strcmp(word, ".global") == 0 || strcmp(word, ".const") == 0) && !skipped)
            total = plus(total, declaration(&at, variables));
        skipped = strcmp(word, ".extern") == 0 || strcmp(word, ".ptr") == 0;
    }
    free(plain);
    return total;
}

/* ---- cubins and fat binaries ---- */

#define FAT_HEADER 16 /* bytes */

static uint64_t cubin_size(const char *image, size_t size) {
    Elf64_Ehdr header;
    uint64_t total = 0;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr) || header.e_shoff > size ||
        header.e_shnum > (size - header.e_shoff) / sizeof(Elf64_Shdr) || header.e_shstrndx >= header.e_shnum)
        return 0;
    Elf64_Shdr named, section;
    const char *sections = image + header.e_shoff;
    memcpy(&named, sections + header.e_shstrndx * sizeof named, sizeof named);
    if (named.sh_type == SHT_NOBITS || named.sh_offset > size || named.sh_size > size - named.sh_offset ||
        named.sh_size == 0 || image[named.sh_offset + named.sh_size - 1] != '\0')
        return 0;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, sections + i * sizeof section, sizeof section);
        const char *name = section.sh_name < named.sh_size ? image + named.sh_offset + section.sh_name : "";
        bool loaded = section.sh_type == SHT_PROGBITS || section.sh_type == SHT_NOBITS;
        bool on_chip = strncmp(name, ".nv.shared", 10) == 0 || strncmp(name, ".nv.local", 9) == 0;
        if (loaded && !on_chip && section.sh_flags & SHF_ALLOC)
            total = plus(total, section.sh_size);
    }
    return total;
}

/* Its header says how long it is, which may be more than there is. */
static uint64_t fat_size(const char *image, size_t size, struct image_variable **variables) {
    uint16_t header;
    uint64_t rest, most = 0;
    if (size < FAT_HEADER)
        return 0;
    memcpy(&header, image + 6, sizeof header);
    memcpy(&rest, image + 8, sizeof rest);
    if (header > size || rest > size - header)
        return 0;
    for (const char *at = image + header, *end = at + rest; end - at >= 64;) {
        uint32_t before;
        uint64_t bytes, unpacked;
        memcpy(&before, at + 4, sizeof before);
        memcpy(&bytes, at + 8, sizeof bytes);
        memcpy(&unpacked, at + 56, sizeof unpacked);
        if (before < 64 || before > end - at || bytes > (uint64_t)(end - at) - before)
            break;
        uint64_t taken = unpacked ? unpacked : image_size(at + before, bytes, variables);
        most = taken > most ? taken : most;
        at += before + bytes;
    }
    return most;
}

uint64_t image_size(const void *image, size_t size, struct image_variable **variables) {
    const char *text = image;
    if (size == SIZE_MAX && strncmp(text, "\xb1\x43\x62\x46", 4) == 0) { /* a compiler's wrapper */
        memcpy(&text, text + 8, sizeof text);
        return fat_size(text, size, variables);
    }
    if (strncmp(text, "\x50\xed\x55\xba", 4) == 0)
        return fat_size(text, size, variables);
    if (strncmp(text, "\177ELF", 4) == 0)
        return size < sizeof(Elf64_Ehdr) ? 0 : cubin_size(text, size);
    bool ptx = *text == '.' || *text == '/' || isspace((unsigned char)*text);
    return ptx ? ptx_size(text, strnlen(text, size), variables) : 0;
}

void image_variables_free(struct image_variable *variables) {
    for (struct image_variable *next; variables; variables = next) {
        next = variables->next;
        free(variables);
    }
}
