/* A program in a container: allocates, says what it got, and stays. slice_client [MIB …]
 *
 * It prints one line: the devices, the slice's MiB, and the result of each allocation. It ends with its standard input,
 * or by SIGTERM. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    unsigned long long address;
    size_t bytes = 0;
    int devices = 0;
    if (!driver)
        return fprintf(stderr, "%s\n", dlerror()), 3;
    int (*init)(unsigned) = dlsym(driver, "cuInit"), (*count)(int *) = dlsym(driver, "cuDeviceGetCount");
    int (*create)(void **, unsigned, int) = dlsym(driver, "cuCtxCreate_v2");
    int (*total)(size_t *, int) = dlsym(driver, "cuDeviceTotalMem_v2");
    int (*alloc)(unsigned long long *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    int result = init(0);
    if (result || (result = count(&devices)) || (result = create(&context, 0, 0)) || (result = total(&bytes, 0)))
        return fprintf(stderr, "error %d\n", result), 4;
    printf("%d %zu", devices, bytes >> 20);
    for (int i = 1; i < argc; i++)
        printf(" %d", alloc(&address, (size_t)atoi(argv[i]) << 20));
    printf("\n");
    fflush(stdout);
    for (char byte; read(0, &byte, 1) > 0;)
        continue;
    return 0;
}
