/* The interface between a proxy and the shim. */
#ifndef FENKA_PROXY_H
#define FENKA_PROXY_H

#define PROXY_EXPORT __attribute__((visibility("default")))

/* The shim's: what the trampoline of this name jumps to. The hook, if there is one and the driver that was loaded as
 * `driver` has the function, too; else the driver's own; NULL = the driver lacks it. From now on the shim calls only
 * functions that it finds here. */
PROXY_EXPORT void *fenka_proxy_target(void *driver, const char *name);

/* The shim's: the driver's own function, even if it is hooked. NULL = the driver lacks it. */
PROXY_EXPORT void *fenka_driver_function(void *driver, const char *name);

/* The proxies', as fenka_cuda_driver and fenka_nvml_driver: the same for the driver behind the proxy. A library that
 * exports this function is a proxy, not a driver. */
typedef void *proxy_driver(const char *name);
#endif
