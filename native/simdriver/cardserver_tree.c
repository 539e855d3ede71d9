/* The capability files of instances, where the node has a host tree: `host-tree` in its directory is then a link to it.
 * A program that may open an instance's file may use the instance. The rest of the tree never changes. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "cardserver.h"

#define CAPABILITIES "host-tree/proc/driver/nvidia/capabilities"
#define DEVICES "host-tree/dev/nvidia-caps"
/* The real capabilities have a major number that the kernel chooses; this one is NVIDIA's on every machine. */
#define NVIDIA_MAJOR 195
/* As the driver numbers them: 15 GPU instances of a card, 8 compute instances of each. */
#define FIRST_MINOR 3
#define MINORS_OF_GPU 9
#define MINORS_OF_CARD (FENKA_NODE_MIG_GPU_INSTANCES * MINORS_OF_GPU)

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    if (!file)
        return;
    fputs(text, file);
    fclose(file);
    chmod(path, 0444);
}

/* Makes or removes a directory with its file, and the device of this minor. */
static void show(const char *directory, unsigned minor, bool present) {
    char access[256], device[64], text[96];
    snprintf(access, sizeof access, "%s/access", directory);
    snprintf(device, sizeof device, DEVICES "/nvidia-cap%u", minor);
    if (!present) {
        unlink(device);
        unlink(access);
        rmdir(directory);
        return;
    }
    snprintf(text, sizeof text, "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor);
    mkdir(directory, 0755);
    write_file(access, text);
    /* Nothing serves the device. Only root can make one; for others a file shows that it is there. */
    if (mknod(device, S_IFCHR | 0444, makedev(NVIDIA_MAJOR, minor)) != 0)
        write_file(device, "");
}

static void show_gpu(uint32_t card, uint32_t id) {
    const struct fenka_node_mig_gpu *gpu = &state->mig[card].gpus[id];
    unsigned minor = FIRST_MINOR + MINORS_OF_CARD * card + MINORS_OF_GPU * id;
    char directory[128], inside[160];
    snprintf(directory, sizeof directory, CAPABILITIES "/gpu%u/mig/gi%u", card, id);
    if (gpu->present)
        show(directory, minor, true);
    for (uint32_t compute = 0; compute < FENKA_NODE_MIG_COMPUTE_INSTANCES; compute++) {
        snprintf(inside, sizeof inside, "%s/ci%u", directory, compute);
        show(inside, minor + 1 + compute, gpu->present && gpu->compute[compute].present);
    }
    if (!gpu->present)
        show(directory, minor, false);
}

void tree_update(uint32_t card) {
    struct stat found;
    if (stat(CAPABILITIES, &found) != 0 || state->mig[card].profile_count == 0)
        return;
    for (uint32_t id = 0; id < FENKA_NODE_MIG_GPU_INSTANCES; id++)
        show_gpu(card, id);
}
