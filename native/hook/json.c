#include "json.h"

#include <string.h>

static const char *skip_space(const char *at) {
    while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')
        at++;
    return at;
}

/* Returns what follows the string that begins at `at`; NULL if it does not end. */
static const char *skip_string(const char *at) {
    for (at++; *at; at++) {
        if (*at == '"')
            return at + 1;
        if (*at == '\\' && !*++at)
            return NULL;
    }
    return NULL;
}

/* Without recursion: others choose the depth. */
static const char *skip_value(const char *at) {
    unsigned depth = 0;
    do {
        at = skip_space(at);
        if (*at == '"') {
            at = skip_string(at);
            if (!at)
                return NULL;
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (*at == '}' || *at == ']') {
            if (!depth--)
                return NULL;
            at++;
        } else if (*at == ',' || *at == ':') {
            if (!depth)
                return NULL;
            at++;
        } else {
            size_t bytes = strcspn(at, " \t\r\n\"{}[],:");
            if (!bytes)
                return NULL;
            at += bytes;
        }
    } while (depth);
    return at;
}

const char *json_member(const char *text, const char *name) {
    size_t length = strlen(name);
    const char *at = skip_space(text);
    if (*at != '{')
        return NULL;
    do {
        const char *key = skip_space(at + 1), *value;
        if (*key != '"' || !(at = skip_string(key)))
            return NULL;
        bool found = (size_t)(at - key) == length + 2 && !memcmp(key + 1, name, length);
        at = skip_space(at);
        if (*at != ':')
            return NULL;
        value = skip_space(at + 1);
        if (found)
            return value;
        at = skip_value(value);
        if (!at)
            return NULL;
        at = skip_space(at);
    } while (*at == ',');
    return NULL;
}

bool json_string(const char *value, char *to, size_t room) {
    if (!value || *value++ != '"')
        return false;
    while (*value != '"') {
        if (*value == '\\' && *++value != '"' && *value != '\\' && *value != '/')
            return false;
        if (!*value || room < 2)
            return false;
        *to++ = *value++;
        room--;
    }
    *to = 0;
    return room > 0;
}

int json_number(const char *value) {
    int number = 0, digits = 0;
    while (value && *value >= '0' && *value <= '9' && digits++ < 9)
        number = number * 10 + *value++ - '0';
    return digits && digits < 10 && number ? number : -1;
}
