/* Every function of the driver that the shim replaces or needs, each named once.
 *
 * CUDA_HOOK(role, name, base, since, per_thread)
 *     Replaced. cuGetProcAddress(base, version, flags) gives it when version >= since and it is the newest
 *     such row whose per_thread equals the flag CU_GET_PROC_ADDRESS_PER_THREAD_…. The role says what it does
 *     to the account, and the tests want a case of their own for each row:
 *       TAKES  charges, and is refused beyond the limit      GIVES  discharges
 *       KEEPS  makes what was taken outlive its first GIVES  NOTES  remembers, charges nothing
 *       TELLS  answers with the slice                        DOOR   leads to all others
 *       SPENDS gives the card work, and waits while the lease has had its share of the card's time
 * CUDA_USE(name)
 *     Only called. NVML_HOOK, NVML_USE: the same for NVML.
 *
 * Signatures come from cuda.h and nvml.h; the includer defines the four macros it wants. */
#ifndef CUDA_HOOK
#define CUDA_HOOK(role, name, base, since, per_thread)
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

CUDA_HOOK(DOOR, cuInit, cuInit, 2000, 0)
CUDA_HOOK(DOOR, cuGetProcAddress, cuGetProcAddress, 11030, 0)
CUDA_HOOK(DOOR, cuGetProcAddress_v2, cuGetProcAddress, 12000, 0)

CUDA_HOOK(TAKES, cuMemAlloc, cuMemAlloc, 2000, 0)
CUDA_HOOK(TAKES, cuMemAlloc_v2, cuMemAlloc, 3020, 0)
CUDA_HOOK(TAKES, cuMemAllocPitch, cuMemAllocPitch, 2000, 0)
CUDA_HOOK(TAKES, cuMemAllocPitch_v2, cuMemAllocPitch, 3020, 0)
CUDA_HOOK(TAKES, cuMemAllocManaged, cuMemAllocManaged, 6000, 0)
CUDA_HOOK(GIVES, cuMemFree, cuMemFree, 2000, 0)
CUDA_HOOK(GIVES, cuMemFree_v2, cuMemFree, 3020, 0)
CUDA_HOOK(TAKES, cuMemAllocAsync, cuMemAllocAsync, 11020, 0)
CUDA_HOOK(TAKES, cuMemAllocAsync_ptsz, cuMemAllocAsync, 11020, 1)
CUDA_HOOK(TAKES, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, 0)
CUDA_HOOK(TAKES, cuMemAllocFromPoolAsync_ptsz, cuMemAllocFromPoolAsync, 11020, 1)
CUDA_HOOK(GIVES, cuMemFreeAsync, cuMemFreeAsync, 11020, 0)
CUDA_HOOK(GIVES, cuMemFreeAsync_ptsz, cuMemFreeAsync, 11020, 1)
CUDA_HOOK(NOTES, cuMemPoolCreate, cuMemPoolCreate, 11020, 0)
CUDA_HOOK(NOTES, cuMemPoolDestroy, cuMemPoolDestroy, 11020, 0)
CUDA_HOOK(NOTES, cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, 0)

CUDA_HOOK(TAKES, cuMemCreate, cuMemCreate, 10020, 0)
CUDA_HOOK(GIVES, cuMemRelease, cuMemRelease, 10020, 0)
CUDA_HOOK(KEEPS, cuMemMap, cuMemMap, 10020, 0)
CUDA_HOOK(GIVES, cuMemUnmap, cuMemUnmap, 10020, 0)
CUDA_HOOK(KEEPS, cuMemMapArrayAsync, cuMemMapArrayAsync, 11010, 0)
CUDA_HOOK(KEEPS, cuMemMapArrayAsync_ptsz, cuMemMapArrayAsync, 11010, 1)
CUDA_HOOK(KEEPS, cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, 0)
CUDA_HOOK(NOTES, cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020, 0)
CUDA_HOOK(KEEPS, cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020, 0)

CUDA_HOOK(TAKES, cuArrayCreate, cuArrayCreate, 2000, 0)
CUDA_HOOK(TAKES, cuArrayCreate_v2, cuArrayCreate, 3020, 0)
CUDA_HOOK(TAKES, cuArray3DCreate, cuArray3DCreate, 2000, 0)
CUDA_HOOK(TAKES, cuArray3DCreate_v2, cuArray3DCreate, 3020, 0)
CUDA_HOOK(GIVES, cuArrayDestroy, cuArrayDestroy, 2000, 0)
CUDA_HOOK(TAKES, cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000, 0)
CUDA_HOOK(GIVES, cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000, 0)

CUDA_HOOK(TAKES, cuModuleLoad, cuModuleLoad, 2000, 0)
CUDA_HOOK(TAKES, cuModuleLoadData, cuModuleLoadData, 2000, 0)
CUDA_HOOK(TAKES, cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, 0)
CUDA_HOOK(TAKES, cuModuleLoadFatBinary, cuModuleLoadFatBinary, 2000, 0)
CUDA_HOOK(GIVES, cuModuleUnload, cuModuleUnload, 2000, 0)
CUDA_HOOK(TAKES, cuLibraryLoadData, cuLibraryLoadData, 12000, 0)
CUDA_HOOK(TAKES, cuLibraryLoadFromFile, cuLibraryLoadFromFile, 12000, 0)
CUDA_HOOK(GIVES, cuLibraryUnload, cuLibraryUnload, 12000, 0)

CUDA_HOOK(TAKES, cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, 11040, 0)
CUDA_HOOK(TAKES, cuGraphAddNode, cuGraphAddNode, 12020, 0)
CUDA_HOOK(TAKES, cuGraphAddNode_v2, cuGraphAddNode, 12030, 0)
CUDA_HOOK(KEEPS, cuGraphInstantiate, cuGraphInstantiate, 10000, 0)
CUDA_HOOK(KEEPS, cuGraphInstantiate_v2, cuGraphInstantiate, 11000, 0)
CUDA_HOOK(KEEPS, cuGraphInstantiateWithFlags, cuGraphInstantiate, 12000, 0)
CUDA_HOOK(KEEPS, cuGraphInstantiateWithParams, cuGraphInstantiateWithParams, 12000, 0)
CUDA_HOOK(KEEPS, cuGraphInstantiateWithParams_ptsz, cuGraphInstantiateWithParams, 12000, 1)
CUDA_HOOK(NOTES, cuGraphAddMemFreeNode, cuGraphAddMemFreeNode, 11040, 0)
CUDA_HOOK(SPENDS, cuGraphLaunch, cuGraphLaunch, 10000, 0)
CUDA_HOOK(SPENDS, cuGraphLaunch_ptsz, cuGraphLaunch, 10000, 1)
CUDA_HOOK(GIVES, cuGraphDestroy, cuGraphDestroy, 10000, 0)
CUDA_HOOK(GIVES, cuGraphExecDestroy, cuGraphExecDestroy, 10000, 0)

CUDA_HOOK(SPENDS, cuLaunch, cuLaunch, 2000, 0)
CUDA_HOOK(SPENDS, cuLaunchGrid, cuLaunchGrid, 2000, 0)
CUDA_HOOK(SPENDS, cuLaunchGridAsync, cuLaunchGridAsync, 2000, 0)
CUDA_HOOK(SPENDS, cuLaunchKernel, cuLaunchKernel, 4000, 0)
CUDA_HOOK(SPENDS, cuLaunchKernel_ptsz, cuLaunchKernel, 7000, 1)
CUDA_HOOK(SPENDS, cuLaunchKernelEx, cuLaunchKernelEx, 11060, 0)
CUDA_HOOK(SPENDS, cuLaunchKernelEx_ptsz, cuLaunchKernelEx, 11060, 1)
CUDA_HOOK(SPENDS, cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000, 0)
CUDA_HOOK(SPENDS, cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel, 9000, 1)
CUDA_HOOK(SPENDS, cuLaunchCooperativeKernelMultiDevice, cuLaunchCooperativeKernelMultiDevice, 9000, 0)

CUDA_HOOK(TAKES, cuCtxCreate, cuCtxCreate, 2000, 0)
CUDA_HOOK(TAKES, cuCtxCreate_v2, cuCtxCreate, 3020, 0)
CUDA_HOOK(TAKES, cuCtxCreate_v3, cuCtxCreate, 11040, 0)
CUDA_HOOK(TAKES, cuCtxCreate_v4, cuCtxCreate, 12050, 0)
CUDA_HOOK(TAKES, cuGreenCtxCreate, cuGreenCtxCreate, 12040, 0)
CUDA_HOOK(GIVES, cuGreenCtxDestroy, cuGreenCtxDestroy, 12040, 0)
CUDA_HOOK(KEEPS, cuCtxAttach, cuCtxAttach, 2000, 0)
CUDA_HOOK(GIVES, cuCtxDetach, cuCtxDetach, 2000, 0)
CUDA_HOOK(TAKES, cuCtxSetLimit, cuCtxSetLimit, 3010, 0)
CUDA_HOOK(GIVES, cuCtxDestroy, cuCtxDestroy, 2000, 0)
CUDA_HOOK(GIVES, cuCtxDestroy_v2, cuCtxDestroy, 4000, 0)
CUDA_HOOK(TAKES, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 0)
CUDA_HOOK(GIVES, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, 0)
CUDA_HOOK(GIVES, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, 0)
CUDA_HOOK(GIVES, cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, 0)
CUDA_HOOK(GIVES, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, 0)

CUDA_HOOK(TELLS, cuMemGetInfo, cuMemGetInfo, 2000, 0)
CUDA_HOOK(TELLS, cuMemGetInfo_v2, cuMemGetInfo, 3020, 0)
CUDA_HOOK(TELLS, cuDeviceTotalMem, cuDeviceTotalMem, 2000, 0)
CUDA_HOOK(TELLS, cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, 0)

CUDA_USE(cuDeviceGet)
CUDA_USE(cuDeviceGetCount)
CUDA_USE(cuDeviceGetUuid)
CUDA_USE(cuDeviceGetUuid_v2)
CUDA_USE(cuDeviceGetMemPool)
CUDA_USE(cuDeviceGetDefaultMemPool)
CUDA_USE(cuMemGetAllocationPropertiesFromHandle)
CUDA_USE(cuDevicePrimaryCtxGetState)
CUDA_USE(cuModuleGetLoadingMode)
CUDA_USE(cuCtxGetCurrent)
CUDA_USE(cuCtxGetDevice)
CUDA_USE(cuCtxPushCurrent_v2)
CUDA_USE(cuCtxPopCurrent_v2)
CUDA_USE(cuStreamGetCtx)
CUDA_USE(cuStreamIsCapturing)
CUDA_USE(cuThreadExchangeStreamCaptureMode)
CUDA_USE(cuEventCreate)
CUDA_USE(cuEventDestroy_v2)
CUDA_USE(cuEventRecord)
CUDA_USE(cuEventQuery)
CUDA_USE(cuEventElapsedTime)
CUDA_USE(cuStreamGetCaptureInfo_v2)
CUDA_USE(cuStreamGetCaptureInfo_v2_ptsz)

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
NVML_HOOK(nvmlInternalGetExportTable)
NVML_USE(nvmlDeviceGetUUID)
NVML_USE(nvmlSystemGetDriverVersion)
NVML_USE(fenka_simulated_nvml)

#undef CUDA_HOOK
#undef CUDA_USE
#undef NVML_HOOK
#undef NVML_USE
