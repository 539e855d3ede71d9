/* Every function of the driver that the shim replaces or calls, each named once.
 *
 * CUDA_HOOK(role, name, base, since, per_thread)
 *     Replaced. cuGetProcAddress(base, version, flags) returns it if version >= since and it is the newest
 *     such row whose per_thread equals the flag CU_GET_PROC_ADDRESS_PER_THREAD_…. The role is its effect on the
 *     account; the tests require a case for each row:
 *       CHARGE     charges, and is refused beyond the limit
 *       DISCHARGE  ends a charge
 *       RETAIN     makes an allocation outlive its first DISCHARGE
 *       TRACK      records state, and charges nothing
 *       REPORT     answers with the slice's values
 *       RESOLVE    leads to the other functions
 *       LAUNCH     starts work on the card, and waits for the compute budget
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

CUDA_HOOK(RESOLVE, cuInit, cuInit, 2000, 0)
CUDA_HOOK(RESOLVE, cuGetProcAddress, cuGetProcAddress, 11030, 0)
CUDA_HOOK(RESOLVE, cuGetProcAddress_v2, cuGetProcAddress, 12000, 0)

CUDA_HOOK(CHARGE, cuMemAlloc, cuMemAlloc, 2000, 0)
CUDA_HOOK(CHARGE, cuMemAlloc_v2, cuMemAlloc, 3020, 0)
CUDA_HOOK(CHARGE, cuMemAllocPitch, cuMemAllocPitch, 2000, 0)
CUDA_HOOK(CHARGE, cuMemAllocPitch_v2, cuMemAllocPitch, 3020, 0)
CUDA_HOOK(CHARGE, cuMemAllocManaged, cuMemAllocManaged, 6000, 0)
CUDA_HOOK(DISCHARGE, cuMemFree, cuMemFree, 2000, 0)
CUDA_HOOK(DISCHARGE, cuMemFree_v2, cuMemFree, 3020, 0)
CUDA_HOOK(CHARGE, cuMemAllocAsync, cuMemAllocAsync, 11020, 0)
CUDA_HOOK(CHARGE, cuMemAllocAsync_ptsz, cuMemAllocAsync, 11020, 1)
CUDA_HOOK(CHARGE, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, 0)
CUDA_HOOK(CHARGE, cuMemAllocFromPoolAsync_ptsz, cuMemAllocFromPoolAsync, 11020, 1)
CUDA_HOOK(DISCHARGE, cuMemFreeAsync, cuMemFreeAsync, 11020, 0)
CUDA_HOOK(DISCHARGE, cuMemFreeAsync_ptsz, cuMemFreeAsync, 11020, 1)
CUDA_HOOK(TRACK, cuMemPoolCreate, cuMemPoolCreate, 11020, 0)
CUDA_HOOK(TRACK, cuMemPoolDestroy, cuMemPoolDestroy, 11020, 0)
CUDA_HOOK(TRACK, cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, 0)
CUDA_HOOK(TRACK, cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, 0)
CUDA_HOOK(TRACK, cuStreamSynchronize, cuStreamSynchronize, 2000, 0)
CUDA_HOOK(TRACK, cuStreamSynchronize_ptsz, cuStreamSynchronize, 7000, 1)
CUDA_HOOK(TRACK, cuCtxSynchronize, cuCtxSynchronize, 2000, 0)
CUDA_HOOK(TRACK, cuEventSynchronize, cuEventSynchronize, 2000, 0)
CUDA_HOOK(TRACK, cuDeviceGraphMemTrim, cuDeviceGraphMemTrim, 11040, 0)

CUDA_HOOK(TRACK, cuIpcGetMemHandle, cuIpcGetMemHandle, 4010, 0)
CUDA_HOOK(TRACK, cuIpcOpenMemHandle, cuIpcOpenMemHandle, 4010, 0)
CUDA_HOOK(TRACK, cuIpcOpenMemHandle_v2, cuIpcOpenMemHandle, 11000, 0)
CUDA_HOOK(TRACK, cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010, 0)

CUDA_HOOK(CHARGE, cuMemCreate, cuMemCreate, 10020, 0)
CUDA_HOOK(DISCHARGE, cuMemRelease, cuMemRelease, 10020, 0)
CUDA_HOOK(RETAIN, cuMemMap, cuMemMap, 10020, 0)
CUDA_HOOK(DISCHARGE, cuMemUnmap, cuMemUnmap, 10020, 0)
CUDA_HOOK(RETAIN, cuMemMapArrayAsync, cuMemMapArrayAsync, 11010, 0)
CUDA_HOOK(RETAIN, cuMemMapArrayAsync_ptsz, cuMemMapArrayAsync, 11010, 1)
CUDA_HOOK(RETAIN, cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, 0)
CUDA_HOOK(TRACK, cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020, 0)
CUDA_HOOK(RETAIN, cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020, 0)

CUDA_HOOK(CHARGE, cuArrayCreate, cuArrayCreate, 2000, 0)
CUDA_HOOK(CHARGE, cuArrayCreate_v2, cuArrayCreate, 3020, 0)
CUDA_HOOK(CHARGE, cuArray3DCreate, cuArray3DCreate, 2000, 0)
CUDA_HOOK(CHARGE, cuArray3DCreate_v2, cuArray3DCreate, 3020, 0)
CUDA_HOOK(DISCHARGE, cuArrayDestroy, cuArrayDestroy, 2000, 0)
CUDA_HOOK(CHARGE, cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000, 0)
CUDA_HOOK(DISCHARGE, cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000, 0)

CUDA_HOOK(CHARGE, cuModuleLoad, cuModuleLoad, 2000, 0)
CUDA_HOOK(CHARGE, cuModuleLoadData, cuModuleLoadData, 2000, 0)
CUDA_HOOK(CHARGE, cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, 0)
CUDA_HOOK(CHARGE, cuModuleLoadFatBinary, cuModuleLoadFatBinary, 2000, 0)
CUDA_HOOK(DISCHARGE, cuModuleUnload, cuModuleUnload, 2000, 0)
CUDA_HOOK(CHARGE, cuLibraryLoadData, cuLibraryLoadData, 12000, 0)
CUDA_HOOK(CHARGE, cuLibraryLoadFromFile, cuLibraryLoadFromFile, 12000, 0)
CUDA_HOOK(DISCHARGE, cuLibraryUnload, cuLibraryUnload, 12000, 0)

CUDA_HOOK(CHARGE, cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, 11040, 0)
CUDA_HOOK(CHARGE, cuGraphAddNode, cuGraphAddNode, 12020, 0)
CUDA_HOOK(CHARGE, cuGraphAddNode_v2, cuGraphAddNode, 12030, 0)
CUDA_HOOK(RETAIN, cuGraphInstantiate, cuGraphInstantiate, 10000, 0)
CUDA_HOOK(RETAIN, cuGraphInstantiate_v2, cuGraphInstantiate, 11000, 0)
CUDA_HOOK(RETAIN, cuGraphInstantiateWithFlags, cuGraphInstantiate, 12000, 0)
CUDA_HOOK(RETAIN, cuGraphInstantiateWithParams, cuGraphInstantiateWithParams, 12000, 0)
CUDA_HOOK(RETAIN, cuGraphInstantiateWithParams_ptsz, cuGraphInstantiateWithParams, 12000, 1)
CUDA_HOOK(TRACK, cuGraphAddMemFreeNode, cuGraphAddMemFreeNode, 11040, 0)
CUDA_HOOK(TRACK, cuStreamEndCapture, cuStreamEndCapture, 10000, 0)
CUDA_HOOK(TRACK, cuStreamEndCapture_ptsz, cuStreamEndCapture, 10000, 1)
CUDA_HOOK(LAUNCH, cuGraphLaunch, cuGraphLaunch, 10000, 0)
CUDA_HOOK(LAUNCH, cuGraphLaunch_ptsz, cuGraphLaunch, 10000, 1)
CUDA_HOOK(DISCHARGE, cuGraphDestroy, cuGraphDestroy, 10000, 0)
CUDA_HOOK(DISCHARGE, cuGraphExecDestroy, cuGraphExecDestroy, 10000, 0)

CUDA_HOOK(LAUNCH, cuLaunch, cuLaunch, 2000, 0)
CUDA_HOOK(LAUNCH, cuLaunchGrid, cuLaunchGrid, 2000, 0)
CUDA_HOOK(LAUNCH, cuLaunchGridAsync, cuLaunchGridAsync, 2000, 0)
CUDA_HOOK(LAUNCH, cuLaunchKernel, cuLaunchKernel, 4000, 0)
CUDA_HOOK(LAUNCH, cuLaunchKernel_ptsz, cuLaunchKernel, 7000, 1)
CUDA_HOOK(LAUNCH, cuLaunchKernelEx, cuLaunchKernelEx, 11060, 0)
CUDA_HOOK(LAUNCH, cuLaunchKernelEx_ptsz, cuLaunchKernelEx, 11060, 1)
CUDA_HOOK(LAUNCH, cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000, 0)
CUDA_HOOK(LAUNCH, cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel, 9000, 1)
CUDA_HOOK(LAUNCH, cuLaunchCooperativeKernelMultiDevice, cuLaunchCooperativeKernelMultiDevice, 9000, 0)

CUDA_HOOK(CHARGE, cuCtxCreate, cuCtxCreate, 2000, 0)
CUDA_HOOK(CHARGE, cuCtxCreate_v2, cuCtxCreate, 3020, 0)
CUDA_HOOK(CHARGE, cuCtxCreate_v3, cuCtxCreate, 11040, 0)
CUDA_HOOK(CHARGE, cuCtxCreate_v4, cuCtxCreate, 12050, 0)
CUDA_HOOK(CHARGE, cuGreenCtxCreate, cuGreenCtxCreate, 12040, 0)
CUDA_HOOK(DISCHARGE, cuGreenCtxDestroy, cuGreenCtxDestroy, 12040, 0)
CUDA_HOOK(RETAIN, cuCtxAttach, cuCtxAttach, 2000, 0)
CUDA_HOOK(DISCHARGE, cuCtxDetach, cuCtxDetach, 2000, 0)
CUDA_HOOK(CHARGE, cuCtxSetLimit, cuCtxSetLimit, 3010, 0)
CUDA_HOOK(DISCHARGE, cuCtxDestroy, cuCtxDestroy, 2000, 0)
CUDA_HOOK(DISCHARGE, cuCtxDestroy_v2, cuCtxDestroy, 4000, 0)
CUDA_HOOK(CHARGE, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 0)
CUDA_HOOK(DISCHARGE, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, 0)
CUDA_HOOK(DISCHARGE, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, 0)
CUDA_HOOK(DISCHARGE, cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, 0)
CUDA_HOOK(DISCHARGE, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, 0)

CUDA_HOOK(REPORT, cuMemGetInfo, cuMemGetInfo, 2000, 0)
CUDA_HOOK(REPORT, cuMemGetInfo_v2, cuMemGetInfo, 3020, 0)
CUDA_HOOK(REPORT, cuDeviceTotalMem, cuDeviceTotalMem, 2000, 0)
CUDA_HOOK(REPORT, cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, 0)

CUDA_USE(cuDeviceGet)
CUDA_USE(cuDeviceGetCount)
CUDA_USE(cuDeviceGetUuid)
CUDA_USE(cuDeviceGetUuid_v2)
CUDA_USE(cuDeviceGetMemPool)
CUDA_USE(cuDeviceGetDefaultMemPool)
CUDA_USE(cuDeviceSetMemPool)
CUDA_USE(cuMemPoolGetAttribute)
CUDA_USE(cuDeviceGetGraphMemAttribute)
CUDA_USE(cuMemGetAddressRange_v2)
CUDA_USE(cuMemGetAllocationPropertiesFromHandle)
CUDA_USE(cuDevicePrimaryCtxGetState)
CUDA_USE(cuModuleGetLoadingMode)
CUDA_USE(cuModuleGetGlobal_v2)
CUDA_USE(cuLibraryGetGlobal)
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
NVML_HOOK(nvmlDeviceGetMigMode)
NVML_HOOK(nvmlDeviceGetMaxMigDeviceCount)
NVML_HOOK(nvmlDeviceGetMigDeviceHandleByIndex)
NVML_HOOK(nvmlDeviceIsMigDeviceHandle)
NVML_HOOK(nvmlInternalGetExportTable)
NVML_USE(nvmlDeviceGetUUID)
NVML_USE(nvmlSystemGetDriverVersion)
NVML_USE(fenka_simulated_nvml)

#undef CUDA_HOOK
#undef CUDA_USE
#undef NVML_HOOK
#undef NVML_USE
