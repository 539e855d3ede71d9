/* Initialisation and shutdown of NVML, versions and error texts. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nvml_device.h"

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    nvml_enter();
    if (nvml_users == 0 && node_state)
        node_detach();
    nvmlReturn_t result = nvml_attach();
    if (result == NVML_SUCCESS)
        nvml_users++;
    nvml_leave();
    return result;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    nvml_enter();
    bool open = nvml_users > 0;
    if (open && --nvml_users == 0) {
        nvml_events_end();
        node_detach();
    }
    nvml_leave();
    return open ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    TRY(nvml_ready());
    return nvml_text(version, length, node_state->driver_version);
}

/* "550.163.01" is of the branch "r550_00". */
nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned int length) {
    char text[96];
    TRY(nvml_ready());
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlSystemDriverBranchInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const char *version = node_state->driver_version;
    snprintf(text, sizeof text, "r%.*s_00", (int)strcspn(version, "."), version);
    return nvml_text(info->branch, length < sizeof info->branch ? length : sizeof info->branch, text);
}

/* NVML's version is CUDA's major number followed by the driver's version. */
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    char text[96];
    TRY(nvml_ready());
    snprintf(text, sizeof text, "%u.%s", node_state->cuda_version / 1000, node_state->driver_version);
    return nvml_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    TRY(nvml_ready());
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)node_state->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    TRY(nvml_ready());
    if (!name || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    size_t got = fread(name, 1, length - 1, file); /* NUL after the first word, as in the file */
    fclose(file);
    name[got] = '\0';
    return NVML_SUCCESS;
}

static const char *const sentences[] = {
    [NVML_SUCCESS] = "Success",
    [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
    [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
    [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
    [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
    [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
    [NVML_ERROR_NOT_FOUND] = "Not Found",
    [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
    [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
    [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
    [NVML_ERROR_TIMEOUT] = "Timeout",
    [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
    [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
    [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
    [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
    [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
    [NVML_ERROR_RESET_REQUIRED] = "GPU requires restart",
    [NVML_ERROR_OPERATING_SYSTEM] = "Operating system blocked the request",
    [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
    [NVML_ERROR_IN_USE] = "In use by another client",
    [NVML_ERROR_MEMORY] = "Insufficient Memory",
    [NVML_ERROR_NO_DATA] = "No data",
    [NVML_ERROR_INSUFFICIENT_RESOURCES] = "Insufficient Resources",
    [NVML_ERROR_ARGUMENT_VERSION_MISMATCH] = "Argument version mismatch",
};

const char *nvmlErrorString(nvmlReturn_t code) {
    size_t index = (size_t)code;
    const char *text = index < sizeof sentences / sizeof *sentences ? sentences[index] : NULL;
    return text ? text : "Unknown Error";
}

/* fenka.hardware recognises simulated cards by this symbol. Nothing else may use it. */
__attribute__((visibility("default"))) int fenka_simulated(void);
int fenka_simulated(void) { return 1; }
