/* CUDA's runtime (libcudart), as far as PyTorch calls it: one device, whose kernels and copies do nothing.
 *
 * Where kernels would have written, the host reads zeros. HOLLOW_CARD_NAME, HOLLOW_CAPABILITY ("90") and
 * HOLLOW_MULTIPROCESSORS say which card it passes for.
 */
#include "card.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VERSION 13000

static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t error) { return last_error = error; }

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

const char *card_name(void) {
    const char *name = getenv("HOLLOW_CARD_NAME");
    return name ? name : "hollow card, no GPU";
}

/* ---- the device */

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = VERSION, cudaSuccess; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the hollow card";
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    (void)device;
    int capability = number("HOLLOW_CAPABILITY", 90);
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = memory_total(),
        .sharedMemPerBlock = 48 << 10,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = 0x7fffffff,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {0x7fffffff, 65535, 65535},
        .totalConstMem = 64 << 10,
        .major = capability / 10,
        .minor = capability % 10,
        .textureAlignment = 512,
        .multiProcessorCount = number("HOLLOW_MULTIPROCESSORS", 132),
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 50 << 20,
        .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1,
        .sharedMemPerMultiprocessor = 228 << 10,
        .regsPerMultiprocessor = 65536,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = 227 << 10,
        .maxBlocksPerMultiProcessor = 32,
    };
    snprintf(properties->name, sizeof properties->name, "%s", card_name());
    for (int index = 0; index < 16; ++index) properties->uuid.bytes[index] = (char)index;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)properties.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    (void)device;
    snprintf(id, (size_t)length, "0000:00:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    return *can = 0, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return order_join_all(), cudaSuccess; }

/* ---- memory */

cudaError_t cudaMalloc(void **address, size_t num_bytes) {
    *address = memory_allocate(num_bytes);
    return *address ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
    if (!address) return cudaSuccess;
    order_join_all(); /* as cudaFree does */
    return memory_release(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = memory_total();
    *free = *total - memory_used();
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **address, size_t num_bytes, unsigned int flags) {
    (void)flags;
    return (*address = pinned_allocate(num_bytes)) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *address) { return pinned_release(address), cudaSuccess; }
cudaError_t cudaHostRegister(void *address, size_t num_bytes, unsigned int flags) {
    (void)flags;
    return pinned_register(address, num_bytes), cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) { return pinned_release(address), cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -1};
    if (memory_holds(address)) {
        *attributes = (struct cudaPointerAttributes){cudaMemoryTypeDevice, 0, (void *)address, NULL, {0}};
    } else if (pinned_holds(address)) {
        *attributes = (struct cudaPointerAttributes){cudaMemoryTypeHost, 0, (void *)address, (void *)address, {0}};
    }
    return cudaSuccess;
}

/* Copies are real where they are small: counts and flags that hosts exchange through the card. What the host reads of
 * larger ones is zeros. */
#define SMALL ((size_t)1 << 20)

static void copy(void *to, const void *from, size_t num_bytes) {
    int to_card = memory_holds(to), from_card = memory_holds(from);
    if (num_bytes <= SMALL || !(to_card || from_card)) memmove(to, from, num_bytes);
    else if (!to_card) memset(to, 0, num_bytes);
}

/* Copies that involve pageable host memory return when they are done; so the host has waited for the stream. */
static int waits(const void *to, const void *from) {
    return !(memory_holds(to) || pinned_holds(to)) || !(memory_holds(from) || pinned_holds(from));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    (void)kind;
    copy(to, from, num_bytes);
    if (waits(to, from)) order_join_stream(order_stream(s));
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    order_join_all();
    return copy(to, from, num_bytes), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    (void)kind;
    for (size_t row = 0; row < height; ++row)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    if (waits(to, from)) order_join_stream(order_stream(s));
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t num_bytes, cudaStream_t s) {
    (void)s;
    if (num_bytes <= SMALL || !memory_holds(to)) memset(to, value, num_bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t num_bytes) { return cudaMemsetAsync(to, value, num_bytes, NULL); }

/* ---- streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned int flags, int priority) {
    (void)flags;
    return *s = (cudaStream_t)order_new_stream(priority), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return (void)s, cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    return *priority = order_priority(order_stream(s)), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return order_join_stream(order_stream(s)), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) {
    return order_idle(order_stream(s)) ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned int flags) {
    (void)flags;
    return order_wait(order_stream(s), (struct event *)event), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    (void)s;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    (void)s, (void)graph, (void)nodes, (void)edges;
    if (id) *id = 0;
    if (count) *count = 0;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return (void)mode, cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *data) {
    (void)s;
    return function(data), cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t callback, void *data, unsigned int flags) {
    (void)flags;
    return callback(s, cudaSuccess, data), cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    return *event = (cudaEvent_t)order_new_event(), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned int flags) {
    (void)flags;
    return order_record((struct event *)event, order_stream(s)), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return order_happened((struct event *)event) ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return order_join_event((struct event *)event), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    (void)begin, (void)end;
    return *milliseconds = 1, cudaSuccess; /* there is no time here */
}

/* ---- kernels */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t s) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)s;
    return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t s) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    (void)config, (void)kernel, (void)arguments;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    (void)kernel;
    int capability = number("HOLLOW_CAPABILITY", 90);
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = capability,
        .binaryVersion = capability,
        .maxDynamicSharedSizeBytes = 227 << 10,
    };
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    (void)kernel, (void)attribute, (void)value;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    (void)kernel, (void)shared;
    return *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned int flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    return *address = (void *)symbol, cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t num_bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    (void)symbol, (void)from, (void)num_bytes, (void)offset, (void)kind;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* What nvcc's code calls when a library is loaded, and around <<< >>>. */
void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
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
cudaError_t __cudaLaunchKernel(void) { return cudaSuccess; }
