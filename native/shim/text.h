/* The functions on text that a lookup needs.
 *
 * libc's cannot be used: a library that looks up a symbol may be replacing those very functions. Sanitizers do, and
 * their strcmp calls a null pointer until dlsym has answered. Files that include this are compiled with -fno-builtin,
 * so that the compiler does not turn the loops back into calls. */
#ifndef FENKA_TEXT_H
#define FENKA_TEXT_H
#include <stdbool.h>
#include <stddef.h>

static inline size_t text_length(const char *text) {
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

static inline bool text_equal(const char *a, const char *b) {
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static inline bool text_begins(const char *text, const char *start) {
    while (*start && *start == *text)
        start++, text++;
    return !*start;
}
#endif
