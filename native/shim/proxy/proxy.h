/* What a proxy and the shim behind it say to each other. */
#ifndef FENKA_PROXY_H
#define FENKA_PROXY_H

#define PROXY_EXPORT __attribute__((visibility("default")))

/* Of the shim: what the trampoline of this name jumps to. Our function when there is one and the driver that was
 * loaded as `driver` has it too, else the driver's own; NULL = the driver has none. From now on the shim takes
 * what is found here, and nothing else, for the driver's. */
PROXY_EXPORT void *fenka_proxy_target(void *driver, const char *name);

/* Of the shim: the driver's own function, whatever is ours. NULL = it has none. */
PROXY_EXPORT void *fenka_driver_function(void *driver, const char *name);

/* Of the proxies, as fenka_cuda_driver and fenka_nvml_driver: the same for the driver that it stands for. That a
 * library has this function is also how a proxy is told from a driver. */
typedef void *proxy_driver(const char *name);
#endif
