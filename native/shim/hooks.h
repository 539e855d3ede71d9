/* Every function of the driver that the shim replaces or needs, each named once.
 *
 * CUDA_HOOK(name, base, since, per_thread)  replaced. cuGetProcAddress(base, version, flags) gives it when
 *                                           version >= since and it is the newest such row whose
 *                                           per_thread equals the flag CU_GET_PROC_ADDRESS_PER_THREAD_….
 * CUDA_USE(name)                            only called. NVML_HOOK, NVML_USE: the same for NVML.
 *
 * Signatures come from cuda.h and nvml.h; the includer defines the four macros it wants. */
#ifndef CUDA_HOOK
#define CUDA_HOOK(name, base, since, per_thread)
#endif
#ifndef CUDA_USE
#define CUDA_USE(name)
#endif
#ifndef NVML_HOOK
#define NVML_HOOK(name)
#endif
#ifndef NVML_USE
#define NVML_USE(name)
#endif

CUDA_HOOK(cuInit, cuInit, 2000, 0)
CUDA_HOOK(cuGetProcAddress, cuGetProcAddress, 11030, 0)
CUDA_HOOK(cuGetProcAddress_v2, cuGetProcAddress, 12000, 0)

CUDA_HOOK(cuMemAlloc, cuMemAlloc, 2000, 0)
CUDA_HOOK(cuMemAlloc_v2, cuMemAlloc, 3020, 0)
CUDA_HOOK(cuMemAllocPitch, cuMemAllocPitch, 2000, 0)
CUDA_HOOK(cuMemAllocPitch_v2, cuMemAllocPitch, 3020, 0)
CUDA_HOOK(cuMemAllocManaged, cuMemAllocManaged, 6000, 0)
CUDA_HOOK(cuMemFree, cuMemFree, 2000, 0)
CUDA_HOOK(cuMemFree_v2, cuMemFree, 3020, 0)
CUDA_HOOK(cuMemAllocAsync, cuMemAllocAsync, 11020, 0)
CUDA_HOOK(cuMemAllocAsync_ptsz, cuMemAllocAsync, 11020, 1)
CUDA_HOOK(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, 0)
CUDA_HOOK(cuMemAllocFromPoolAsync_ptsz, cuMemAllocFromPoolAsync, 11020, 1)
CUDA_HOOK(cuMemFreeAsync, cuMemFreeAsync, 11020, 0)
CUDA_HOOK(cuMemFreeAsync_ptsz, cuMemFreeAsync, 11020, 1)
CUDA_HOOK(cuMemPoolCreate, cuMemPoolCreate, 11020, 0)
CUDA_HOOK(cuMemPoolDestroy, cuMemPoolDestroy, 11020, 0)

CUDA_HOOK(cuMemCreate, cuMemCreate, 10020, 0)
CUDA_HOOK(cuMemRelease, cuMemRelease, 10020, 0)
CUDA_HOOK(cuMemMap, cuMemMap, 10020, 0)
CUDA_HOOK(cuMemUnmap, cuMemUnmap, 10020, 0)
CUDA_HOOK(cuMemMapArrayAsync, cuMemMapArrayAsync, 11010, 0)
CUDA_HOOK(cuMemMapArrayAsync_ptsz, cuMemMapArrayAsync, 11010, 1)
CUDA_HOOK(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, 0)

CUDA_HOOK(cuArrayCreate, cuArrayCreate, 2000, 0)
CUDA_HOOK(cuArrayCreate_v2, cuArrayCreate, 3020, 0)
CUDA_HOOK(cuArray3DCreate, cuArray3DCreate, 2000, 0)
CUDA_HOOK(cuArray3DCreate_v2, cuArray3DCreate, 3020, 0)
CUDA_HOOK(cuArrayDestroy, cuArrayDestroy, 2000, 0)
CUDA_HOOK(cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000, 0)
CUDA_HOOK(cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000, 0)

CUDA_HOOK(cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, 11040, 0)
CUDA_HOOK(cuGraphAddNode, cuGraphAddNode, 12020, 0)
CUDA_HOOK(cuGraphAddNode_v2, cuGraphAddNode, 12030, 0)

CUDA_HOOK(cuCtxCreate, cuCtxCreate, 2000, 0)
CUDA_HOOK(cuCtxCreate_v2, cuCtxCreate, 3020, 0)
CUDA_HOOK(cuCtxCreate_v3, cuCtxCreate, 11040, 0)
CUDA_HOOK(cuCtxCreate_v4, cuCtxCreate, 12050, 0)
CUDA_HOOK(cuCtxDestroy, cuCtxDestroy, 2000, 0)
CUDA_HOOK(cuCtxDestroy_v2, cuCtxDestroy, 4000, 0)
CUDA_HOOK(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 0)
CUDA_HOOK(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, 0)
CUDA_HOOK(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, 0)
CUDA_HOOK(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, 0)
CUDA_HOOK(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, 0)

CUDA_HOOK(cuMemGetInfo, cuMemGetInfo, 2000, 0)
CUDA_HOOK(cuMemGetInfo_v2, cuMemGetInfo, 3020, 0)
CUDA_HOOK(cuDeviceTotalMem, cuDeviceTotalMem, 2000, 0)
CUDA_HOOK(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, 0)

CUDA_USE(cuDeviceGet)
CUDA_USE(cuDeviceGetCount)
CUDA_USE(cuDeviceGetUuid)
CUDA_USE(cuDeviceGetUuid_v2)
CUDA_USE(cuDeviceGetMemPool)
CUDA_USE(cuDeviceGetDefaultMemPool)
CUDA_USE(cuDevicePrimaryCtxGetState)
CUDA_USE(cuCtxGetCurrent)
CUDA_USE(cuCtxGetDevice)
CUDA_USE(cuCtxPushCurrent_v2)
CUDA_USE(cuCtxPopCurrent_v2)
CUDA_USE(cuStreamGetCtx)

NVML_HOOK(nvmlDeviceGetCount)
NVML_HOOK(nvmlDeviceGetCount_v2)
NVML_HOOK(nvmlDeviceGetHandleByIndex)
NVML_HOOK(nvmlDeviceGetHandleByIndex_v2)
NVML_HOOK(nvmlDeviceGetHandleByUUID)
NVML_HOOK(nvmlDeviceGetHandleByUUIDV)
NVML_HOOK(nvmlDeviceGetHandleBySerial)
NVML_HOOK(nvmlDeviceGetHandleByPciBusId)
NVML_HOOK(nvmlDeviceGetHandleByPciBusId_v2)
NVML_HOOK(nvmlDeviceGetIndex)
NVML_HOOK(nvmlDeviceGetMemoryInfo)
NVML_HOOK(nvmlDeviceGetMemoryInfo_v2)
NVML_HOOK(nvmlDeviceGetComputeRunningProcesses)
NVML_HOOK(nvmlDeviceGetComputeRunningProcesses_v2)
NVML_HOOK(nvmlDeviceGetComputeRunningProcesses_v3)
NVML_HOOK(nvmlDeviceGetGraphicsRunningProcesses)
NVML_HOOK(nvmlDeviceGetGraphicsRunningProcesses_v2)
NVML_HOOK(nvmlDeviceGetGraphicsRunningProcesses_v3)
NVML_HOOK(nvmlDeviceGetMPSComputeRunningProcesses)
NVML_HOOK(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NVML_HOOK(nvmlDeviceGetMPSComputeRunningProcesses_v3)
NVML_USE(nvmlDeviceGetUUID)

#undef CUDA_HOOK
#undef CUDA_USE
#undef NVML_HOOK
#undef NVML_USE
