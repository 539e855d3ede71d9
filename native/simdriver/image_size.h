/* How much of a card an image takes, as the assembler would decide it. It does not share the shim's parser: the shim's
 * figures are compared with these. */
#ifndef FENKA_SIMULATED_IMAGE_SIZE_H
#define FENKA_SIMULATED_IMAGE_SIZE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct image_variable {
    uint64_t bytes;
    struct image_variable *next;
    char name[];
};

/* Bytes of code and variables. `size`: SIZE_MAX if it is not known; then text ends with NUL. The caller frees
 * `variables`: those of PTX, by name. */
uint64_t image_size(const void *image, size_t size, struct image_variable **variables);
void image_variables_free(struct image_variable *variables);
/* A copy of PTX with a space for each comment, NUL-terminated; NULL without memory. */
char *image_without_comments(const char *text, size_t length);

/* ---- image_names.c: what an image defines ---- */
#define IMAGE_ARGUMENTS 256
/* A kernel, and where its arguments lie. */
struct image_function {
    struct image_function *next;
    size_t count;
    struct {
        uint32_t offset, size;
    } each[IMAGE_ARGUMENTS];
    char name[];
};
struct image_names {
    struct image_function *functions;
    struct image_variable *variables;
    bool complete; /* false: the image is packed, and may define further names */
};
/* Of a cubin of that size, a fat binary or PTX; the caller frees it with image_names_free. */
void image_names(const void *image, size_t size, struct image_names *names);
void image_names_free(struct image_names *names);
#endif
