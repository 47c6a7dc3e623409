/* The GPUs as the environment describes them, and what their compute capability adds. */
#include "stand_in.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory, threads and blocks of
 * a multiprocessor. L2, clocks and bus width are those of a usual GPU of that capability, from NVIDIA's datasheets:
 * V100, T4, A100 80GB, A10, Jetson Orin, L40S, H100 SXM, B200, B300, RTX PRO 6000.
 *
 * Threads and multiprocessors decide CUB's scratch memory (kilobytes); shared memory which kernels Triton and Inductor
 * may choose; L2 a buffer of Inductor's benchmarks; clocks and bus width Inductor's estimates of how long operators
 * take (get_gpu_dram_gbps), by which it orders collectives if it is asked to. */
static const struct limits LIMITS[] = {
    {70, 96, 96, 2048, 32, 6, 1530000, 877000, 4096},
    {75, 64, 64, 1024, 16, 4, 1590000, 5001000, 256},
    {80, 164, 163, 2048, 32, 40, 1410000, 1593000, 5120},
    {86, 100, 99, 1536, 16, 6, 1695000, 6251000, 384},
    {87, 164, 163, 1536, 16, 4, 1300000, 3200000, 256},
    {89, 100, 99, 1536, 24, 96, 2520000, 9001000, 384},
    {90, 228, 227, 2048, 32, 50, 1980000, 2619000, 5120},
    {100, 228, 227, 2048, 32, 126, 1965000, 3996000, 8192},
    {103, 228, 227, 2048, 32, 126, 1965000, 3996000, 8192},
    {120, 100, 99, 1536, 24, 128, 2617000, 14001000, 512},
};

/* GPUs with another L2 than that. Inductor allocates as much when it measures kernels (triton.testing, _inductor's
 * benchmarker), so it is part of the memory reserved. */
static const struct {
    const char *name;
    int l2_mib;
} OTHER_L2[] = {
    {"NVIDIA L4", 48},
    {"NVIDIA GeForce RTX 4080", 64},
    {"NVIDIA GeForce RTX 4090", 72},
    {"NVIDIA GeForce RTX 5090", 96},
    {"NVIDIA H20", 60},
};

static struct gpu gpu;
static enum progress progress;
static int warn_only;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int says(const char *name, const char *word) {
    const char *text = getenv(name);
    return text && !strcmp(text, word);
}

/* Happens once by itself; a fork with another environment calls it. */
__attribute__((visibility("default"))) void stand_in_read_settings(void) {
    const char *name = getenv("STAND_IN_NAME");
    snprintf(gpu.name, sizeof gpu.name, "%s", name ? name : "NVIDIA H100 80GB HBM3");
    gpu.count = (int)number("STAND_IN_DEVICES", 1);
    if (gpu.count > MAX_DEVICES) gpu.count = MAX_DEVICES;
    gpu.total_bytes = number("STAND_IN_BYTES", (size_t)80 << 30);
    gpu.context_bytes = number("STAND_IN_CONTEXT_BYTES", (size_t)500 << 20);
    gpu.capability = (int)number("STAND_IN_CAPABILITY", 90);
    gpu.multiprocessors = (int)number("STAND_IN_MULTIPROCESSORS", 132);
    gpu.limits = LIMITS; /* the newest capability that is not newer */
    for (size_t index = 0; index < sizeof LIMITS / sizeof *LIMITS; ++index)
        if (LIMITS[index].capability <= gpu.capability) gpu.limits = &LIMITS[index];
    gpu.l2_mib = gpu.limits->l2_mib;
    for (size_t index = 0; index < sizeof OTHER_L2 / sizeof *OTHER_L2; ++index)
        if (!strcmp(OTHER_L2[index].name, gpu.name)) gpu.l2_mib = OTHER_L2[index].l2_mib;
    progress = says("STAND_IN_PROGRESS", "behind") ? BEHIND : says("STAND_IN_PROGRESS", "idle") ? IDLE : PACE;
    warn_only = says("STAND_IN_UNSUPPORTED", "warn");
}

const struct gpu *settings_gpu(void) {
    pthread_once(&once, stand_in_read_settings);
    return &gpu;
}
enum progress settings_progress(void) {
    pthread_once(&once, stand_in_read_settings);
    return progress;
}
int settings_warn_only(void) {
    pthread_once(&once, stand_in_read_settings);
    return warn_only;
}

void fill_properties(struct cudaDeviceProp *properties, int device) {
    const struct gpu *gpu = settings_gpu();
    const struct limits *limits = gpu->limits;
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = gpu->total_bytes,
        .sharedMemPerBlock = 48 << 10,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = 0x7fffffff,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {0x7fffffff, 65535, 65535},
#if CUDA_VERSION < 13000
        .clockRate = limits->clock_khz,
        .memoryClockRate = limits->memory_clock_khz,
        .deviceOverlap = 1,
        .singleToDoublePrecisionPerfRatio = 2,
        .cooperativeMultiDeviceLaunch = 1,
#endif
        .totalConstMem = 64 << 10,
        .major = gpu->capability / 10,
        .minor = gpu->capability % 10,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .multiProcessorCount = gpu->multiprocessors,
        .canMapHostMemory = 1,
        .surfaceAlignment = 512,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = device_index(device) + 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = limits->memory_bus_bits,
        .l2CacheSize = gpu->l2_mib << 20,
        .maxThreadsPerMultiProcessor = limits->threads_per_multiprocessor,
        .streamPrioritiesSupported = 1,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .sharedMemPerMultiprocessor = (size_t)limits->shared_per_multiprocessor_kib << 10,
        .regsPerMultiprocessor = 65536,
        .computePreemptionSupported = 1,
        .canUseHostPointerForRegisteredMem = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = (size_t)limits->shared_per_block_optin_kib << 10,
        .maxBlocksPerMultiProcessor = limits->blocks_per_multiprocessor,
        .reservedSharedMemPerBlock = gpu->capability >= 80 ? 1024 : 0,
        .hostRegisterSupported = 1,
        .clusterLaunch = gpu->capability >= 90,
        .unifiedFunctionPointers = 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", gpu->name);
    for (int index = 0; index < 16; ++index) properties->uuid[index] = (unsigned char)index;
    properties->uuid[0] = (unsigned char)device_index(device); /* as nvml.c prints it */
}

/* cudaDeviceAttr and CUdevice_attribute have the same numbers. */
int device_attribute(int attribute, int device) {
    struct cudaDeviceProp properties;
    fill_properties(&properties, device);
    const struct limits *limits = settings_gpu()->limits;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return properties.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX: return properties.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY: return properties.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ: return properties.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return properties.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return properties.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ: return properties.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)properties.sharedMemPerBlock;
    case cudaDevAttrTotalConstantMemory: return (int)properties.totalConstMem;
    case cudaDevAttrWarpSize: return properties.warpSize;
    case cudaDevAttrMaxPitch: return (int)properties.memPitch;
    case cudaDevAttrMaxRegistersPerBlock: return properties.regsPerBlock;
    case cudaDevAttrClockRate: return limits->clock_khz;
    case cudaDevAttrTextureAlignment: return (int)properties.textureAlignment;
    case cudaDevAttrGpuOverlap: return 1; /* copies and kernels at once */
    case cudaDevAttrMultiProcessorCount: return properties.multiProcessorCount;
    case cudaDevAttrCanMapHostMemory: return properties.canMapHostMemory;
    case cudaDevAttrConcurrentKernels: return properties.concurrentKernels;
    case cudaDevAttrEccEnabled: return properties.ECCEnabled;
    case cudaDevAttrPciBusId: return properties.pciBusID;
    case cudaDevAttrMemoryClockRate: return limits->memory_clock_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return properties.memoryBusWidth;
    case cudaDevAttrL2CacheSize: return properties.l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return properties.maxThreadsPerMultiProcessor;
    case cudaDevAttrAsyncEngineCount: return properties.asyncEngineCount;
    case cudaDevAttrUnifiedAddressing: return properties.unifiedAddressing;
    case cudaDevAttrComputeCapabilityMajor: return properties.major;
    case cudaDevAttrComputeCapabilityMinor: return properties.minor;
    case cudaDevAttrStreamPrioritiesSupported: return properties.streamPrioritiesSupported;
    case cudaDevAttrGlobalL1CacheSupported: return properties.globalL1CacheSupported;
    case cudaDevAttrLocalL1CacheSupported: return properties.localL1CacheSupported;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)properties.sharedMemPerMultiprocessor;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return properties.regsPerMultiprocessor;
    case cudaDevAttrComputePreemptionSupported: return properties.computePreemptionSupported;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: return properties.canUseHostPointerForRegisteredMem;
    case cudaDevAttrCooperativeLaunch: return properties.cooperativeLaunch;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)properties.sharedMemPerBlockOptin;
    case cudaDevAttrHostRegisterSupported: return properties.hostRegisterSupported;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1; /* expandable segments */
    case cudaDevAttrMaxBlocksPerMultiprocessor: return properties.maxBlocksPerMultiProcessor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return (int)properties.reservedSharedMemPerBlock;
    case cudaDevAttrClusterLaunch: return properties.clusterLaunch;
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return properties.clusterLaunch; /* both since 9.0 */
    case CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS: return properties.unifiedFunctionPointers;
    default: return 0; /* textures, peers, managed memory, memory pools, multicast: none */
    }
}
