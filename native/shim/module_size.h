/* Computes from an image how much of a card the code takes. */
#ifndef FENKA_IMAGE_H
#define FENKA_IMAGE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODULE_SIZE_UNBOUNDED SIZE_MAX /* the driver gets no size either */

/* Charged for an image of an unknown kind. */
#define MODULE_SIZE_UNKNOWN ((uint64_t)2 << 20)

/* For any image that the driver would load; of others it reads no further than the driver must.
 *   cubin        the sections that are loaded: code, constants, and variables with and without first values
 *   PTX          the length of the text, for the code that it becomes, and the variables that it declares
 *   fat binary   the largest of its images, of which the driver takes one. Compressed, their size when unpacked
 * `lazily`: of a fat binary's kernels each is loaded when it is first used; then only its data counts. */
uint64_t module_size(const void *image, size_t size, bool lazily);
#endif
