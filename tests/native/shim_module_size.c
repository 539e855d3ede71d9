/* With FUZZ a target of libFuzzer. Else what the shim reads out of an image: a file, "data" (all but its size is known, as from a driver's caller) or
 * "file", and "eager" or "lazy". Prints the bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "module_size.h"

#ifdef FUZZ
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t eager = module_size(data, size, 0, NULL, NULL).bytes, lazy = module_size(data, size, 1, NULL, NULL).bytes;
    if (lazy > eager)
        abort();
    return 0;
}
#else
int main(int argc, char **argv) {
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    char *image = NULL;
    if (!file)
        return 1;
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    /* As long as the image is, and no longer, for the sanitizer to see. Text ends with a zero where its
     * size is not given. */
    int data = !strcmp(argv[2], "data");
    image = malloc(size + data);
    if (fread(image, 1, size, file) != size)
        return 1;
    if (data)
        image[size] = 0;
    printf("%llu\n", (unsigned long long)module_size(image, data ? MODULE_SIZE_UNBOUNDED : size, !strcmp(argv[3], "lazy"), NULL, NULL).bytes);
    free(image);
    return 0;
}
#endif
