/* CUDA's runtime: kernels, which do nothing, and what nvcc's code calls around them. */
#include "stand_in.h"

#include <string.h>

/* A kernel that was compiled for other GPUs alone cannot be launched: PyTorch's wheels leave out old and new ones. */
static cudaError_t launched(const void *kernel, cudaStream_t stream) {
    if (!architecture_of(kernel)) return failed(cudaErrorNoKernelImageForDevice);
    return stream_launched(stream_of(stream), name_of(kernel)), cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)grid, (void)block, (void)arguments, (void)shared;
    return launched(kernel, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    (void)arguments;
    return launched(kernel, config->stream);
}
/* The number of registers is a guess, and static shared memory is left out. CUB and cuBLAS's callers size grids with
 * them, and scratch memory of a few kilobytes. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    const struct gpu *gpu = settings_gpu();
    int architecture = architecture_of(kernel);
    if (!architecture) return failed(cudaErrorNoKernelImageForDevice);
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = architecture,
        .binaryVersion = architecture,
        .maxDynamicSharedSizeBytes = gpu->limits->shared_per_block_optin_kib << 10,
    };
    return cudaSuccess;
}
/* Attribute 8 is cudaFuncAttributeMaxDynamicSharedMemorySize, in the driver too. */
int kernel_takes(int attribute, int value) {
    return attribute != 8 || value <= settings_gpu()->limits->shared_per_block_optin_kib << 10;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
    return (void)kernel, kernel_takes(attribute, value) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
/* More L1 or more shared memory: only time would depend on it. */
cudaError_t cudaFuncSetCacheConfig(const void *kernel, int config) { return (void)kernel, (void)config, cudaSuccess; }

/* As many blocks as threads and shared memory allow; of registers nothing is known. */
int blocks_per_multiprocessor(int threads, size_t shared_bytes) {
    const struct limits *limits = settings_gpu()->limits;
    int blocks = threads > 0 && threads <= 1024 ? limits->threads_per_multiprocessor / threads : 1;
    size_t shared = ((size_t)limits->shared_per_multiprocessor_kib << 10) / (shared_bytes ? shared_bytes : 1);
    if (shared < (size_t)blocks) blocks = (int)shared;
    return blocks < limits->blocks_per_multiprocessor ? blocks : limits->blocks_per_multiprocessor;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    (void)kernel;
    return *blocks = blocks_per_multiprocessor(threads, shared), cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
/* Clusters of 8 blocks, the largest that all GPUs with clusters take. */
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
    (void)kernel, (void)config;
    return *clusters = settings_gpu()->multiprocessors / 8, cudaSuccess;
}
/* Marks for a profiler, which is not there. */
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- what nvcc's code calls when a library is loaded (see also architectures.c), and around <<< >>> */

void __cudaRegisterVar(void) {}
void __cudaRegisterManagedVar(void) {}
void __cudaRegisterHostVar(void) {}
char __cudaInitModule(void **handle) { return (void)handle, 1; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared;
    memcpy(stream, &configuration.stream, sizeof configuration.stream);
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *entry) { return *kernel = (void *)entry, cudaSuccess; }
cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
