/* Finds members of a JSON object without decoding the rest, which others may have written. */
#ifndef FENKA_HOOK_JSON_H
#define FENKA_HOOK_JSON_H
#include <stdbool.h>
#include <stddef.h>

/* The value of a member of the outermost object, where it begins; NULL if there is none. `text` ends with a NUL byte. */
const char *json_member(const char *text, const char *name);

/* Copies a string; false if it is none, has escapes other than of one character, or is too long. */
bool json_string(const char *value, char *to, size_t room);

/* A positive number of at most nine digits; -1 if it is none. */
int json_number(const char *value);
#endif
