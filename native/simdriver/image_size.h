/* How much of a card an image takes, as the assembler would decide it. It does not share the shim's parser: the shim's
 * figures are compared with these. */
#ifndef FENKA_SIMULATED_IMAGE_SIZE_H
#define FENKA_SIMULATED_IMAGE_SIZE_H
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
#endif
