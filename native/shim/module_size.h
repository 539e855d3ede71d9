/* Computes from an image how much of a card the code takes. */
#ifndef FENKA_IMAGE_H
#define FENKA_IMAGE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODULE_SIZE_UNBOUNDED SIZE_MAX /* the driver gets no size either */

#define MODULE_LARGEST_FILE ((size_t)4 << 30) /* beyond it nothing is read */

/* Charged for an image of an unknown kind. */
#define MODULE_SIZE_UNKNOWN ((uint64_t)2 << 20)

/* A variable that PTX declares. */
struct ptx_variable {
    const char *name; /* without a NUL */
    size_t name_length;
    uint64_t bytes; /* as declared, as far as it is a plain number */
    bool plain;     /* else a dimension is an expression */
};

struct module_size {
    uint64_t bytes;
    bool variables; /* PTX declares any */
};

/* Returns the bytes that a variable takes. */
typedef uint64_t (*variable_size)(void *to, const struct ptx_variable *variable);

/* For any image that the driver would load; of others it reads no further than the driver must.
 *   cubin        the sections that are loaded: code, constants, and variables with and without first values
 *   PTX          the length of the text, for the code that it becomes, and the variables that it declares, as `ask`
 *                says; without it MODULE_SIZE_UNKNOWN for one whose size is not a plain number
 *   fat binary   the largest of its images, of which the driver takes one. Compressed, their size when unpacked
 * `lazily`: of a fat binary's kernels each is loaded when it is first used; then only its data counts. */
struct module_size module_size(const void *image, size_t size, bool lazily, variable_size ask, void *to);
#endif
