/* The CUDA driver (libcuda): devices, contexts, modules, launches, as far as PyTorch, Triton and Inductor call it. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static char contexts[MAX_DEVICES], module; /* handles are addresses of these */

static int checked(int device) {
    if (device_error()) return device_error();
    return device_index(device) < 0 ? cudaErrorInvalidDevice : 0;
}

int cuInit(unsigned flags) { return (void)flags, device_error(); }
int cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, 0; }
int cuGetErrorName(int error, const char **text) {
    extern const char *cudaGetErrorName(cudaError_t);
    return *text = cudaGetErrorName(error), 0;
}
int cuGetErrorString(int error, const char **text) {
    extern const char *cudaGetErrorString(cudaError_t);
    return *text = cudaGetErrorString(error), 0;
}

/* Tables of functions that NVIDIA does not document. CUPTI asks for one, and PyTorch's profiler then goes on without
 * kernels: not counted as lacking, as no memory depends on it. A library with a CUDA runtime of its own fails. What
 * cuDNN does here (cudnn.c) needs none of those that it and its compiler have. */
static const char *own_runtime = "";
__attribute__((visibility("default"))) const char *stand_in_own_runtime(void) { return own_runtime; }
int cuGetExportTable(const void **table, const void *id) {
    static const char *const of_cudnn[] = {"/libcudnn", "/libcublasLt", "/libnvrtc"};
    Dl_info caller = {"", 0};
    dladdr(__builtin_return_address(0), &caller);
    int is_needed = 1;
    for (int i = 0; i < 3; ++i) is_needed &= !strstr(caller.dli_fname, of_cudnn[i]);
    if (is_needed && !strstr(caller.dli_fname, "/libcupti")) own_runtime = caller.dli_fname;
    static int is_told;
    if (is_needed && !__atomic_exchange_n(&is_told, 1, __ATOMIC_RELAXED))
        fprintf(stderr, "fsdp-bench rehearse: cuGetExportTable was called, which this stand-in lacks: "
                "profilers see no kernels, and a library with a CUDA runtime of its own cannot start\n");
    return (void)id, *table = NULL, CUDA_ERROR_NOT_FOUND;
}

/* Texts about errors, beside their numbers: torch 2.15 listens to them. There are none. */
int cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    static char listener;
    (void)callback, (void)data;
    if (handle) *handle = &listener;
    return 0;
}
int cuLogsUnregisterCallback(void *handle) { return (void)handle, 0; }

/* ---- devices */

int cuDeviceGetCount(int *count) { return *count = device_count(), 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, checked(ordinal); }
int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "%s", settings_gpu()->name);
    return checked(device);
}
int cuDeviceTotalMem_v2(size_t *num_bytes, int device) {
    return *num_bytes = settings_gpu()->total_bytes, checked(device);
}
int cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    struct cudaDeviceProp properties;
    if (checked(device)) return checked(device);
    fill_properties(&properties, device);
    return memcpy(uuid, properties.uuid, 16), 0;
}
int cuDeviceGetUuid(unsigned char uuid[16], int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (checked(device)) return checked(device);
    return *value = device_attribute(attribute, device), 0;
}
int cuDeviceComputeCapability(int *major, int *minor, int device) {
    *major = settings_gpu()->capability / 10;
    *minor = settings_gpu()->capability % 10;
    return checked(device);
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { return (void)device, (void)peer, *can = 0, 0; }
int cuDeviceGetPCIBusId(char *id, int length, int device) {
    extern cudaError_t cudaDeviceGetPCIBusId(char *, int, int);
    return cudaDeviceGetPCIBusId(id, length, device);
}

/* ---- contexts: the primary one of each device; the current one is that of the current device */

static int device_of(const void *context) { return (int)((const char *)context - contexts); }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (checked(device)) return checked(device);
    return *flags = 0, *active = device_is_used(device), 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (checked(device)) return checked(device);
    return device_use(device), *context = &contexts[device], 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return checked(device); }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)flags, checked(device); }
int cuCtxGetCurrent(void **context) {
    int device = device_current();
    return *context = device_count() && device_is_used(device) ? &contexts[device] : NULL, 0;
}
int cuCtxSetCurrent(void *context) {
    extern cudaError_t cudaSetDevice(int);
    return context ? cudaSetDevice(device_of(context)) : 0;
}
int cuCtxGetDevice(int *device) { return *device = device_current(), 0; }
/* Callers of the first version get this one, too (unsupported.c); so its second argument, the context, is not read. */
int cuCtxGetDevice_v2(int *device) { return *device = device_current(), 0; }
int cuCtxSynchronize(void) { return host_waits_for_device(device_current()), 0; }
int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, 0; } /* as cudaDeviceSetLimit */
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }

static __thread int pushed[16]; /* devices */
static __thread int num_pushed;
int cuCtxPushCurrent_v2(void *context) {
    if (num_pushed == 16) return cudaErrorInvalidValue;
    pushed[num_pushed++] = device_current();
    return cuCtxSetCurrent(context);
}
int cuCtxPopCurrent_v2(void **context) {
    if (!num_pushed) return cudaErrorInvalidValue;
    if (context) cuCtxGetCurrent(context);
    return device_set_current(pushed[--num_pushed]), 0;
}

/* ---- modules: what Triton compiled is accepted and never run */

int cuModuleLoad(void **loaded, const char *path) { return (void)path, *loaded = &module, 0; }
int cuModuleLoadData(void **loaded, const void *image) { return (void)image, *loaded = &module, 0; }
int cuModuleLoadDataEx(void **loaded, const void *image, unsigned count, int *options, void **values) {
    return (void)image, (void)count, (void)options, (void)values, *loaded = &module, 0;
}
int cuModuleUnload(void *loaded) { return (void)loaded, 0; }
int cuModuleGetFunction(void **found, void *loaded, const char *name) {
    return (void)loaded, (*found = strdup(name)) ? 0 : cudaErrorMemoryAllocation; /* a function's handle is its name */
}
/* Registers are a guess, and nothing is spilled: Inductor and Triton drop variants of kernels that spill. That decides
 * which kernel is taken, not what is allocated for it. */
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    switch (attribute) { /* CUfunction_attribute */
    case 0: return *value = 1024, 0; /* threads in a block */
    case 4: return *value = 32, 0;   /* registers */
    case 5: case 6: return *value = settings_gpu()->capability, 0;
    default: return *value = 0, 0; /* shared, constant and local memory: no registers spilled */
    }
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return (void)function, kernel_takes(attribute, value) ? 0 : cudaErrorInvalidValue;
}
int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, 0; }

/* The same by libraries and kernels, of which each context has a module and a function: cuDNN's attention, compiled by
 * NVRTC. */
int cuLibraryLoadData(void **loaded, const void *image) { return cuModuleLoadData(loaded, image); }
int cuLibraryLoadFromFile(void **loaded, const char *path) { return cuModuleLoad(loaded, path); }
int cuLibraryUnload(void *loaded) { return (void)loaded, 0; }
int cuLibraryGetModule(void **of_context, void *loaded) { return *of_context = loaded, 0; }
int cuLibraryGetKernel(void **found, void *loaded, const char *name) {
    return cuModuleGetFunction(found, loaded, name);
}
int cuKernelGetFunction(void **of_context, void *kernel) { return *of_context = kernel, 0; }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    return (void)device, cuFuncGetAttribute(value, attribute, kernel);
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    return (void)device, cuFuncSetAttribute(kernel, attribute, value);
}

/* ---- launches */

static int launched(const char *function, cudaStream_t stream) {
    return stream_launched(stream_of(stream), function), 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, cudaStream_t stream) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared;
    return launched(function, stream);
}
int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, cudaStream_t stream) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream);
}
int cuLaunchKernelEx(const CUlaunchConfig *config, void *function, void **arguments, void **extra) {
    (void)arguments, (void)extra;
    return launched(function, config->hStream);
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    return *clusters = settings_gpu()->multiprocessors / 8, 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    (void)function;
    return *blocks = blocks_per_multiprocessor(threads, shared), 0;
}
int cuTensorMapEncodeTiled(void) { return 0; } /* descriptors for copies of tiles, which no kernel reads */
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    extern cudaError_t cudaThreadExchangeStreamCaptureMode(int *);
    return cudaThreadExchangeStreamCaptureMode(mode);
}
int cuStreamSynchronize(cudaStream_t stream) {
    extern cudaError_t cudaStreamSynchronize(cudaStream_t);
    return cudaStreamSynchronize(stream);
}

/* ---- pointers */

/* Triton asks where a pointer argument points; one that the GPU cannot reach is an error of the user. */
int cuPointerGetAttribute(void *data, int attribute, void *address) {
    struct range range;
    int on_device = memory_range(address, &range);
    if (!on_device && !pinned_range(address, &range)) return cudaErrorInvalidValue;
    switch (attribute) { /* CUpointer_attribute */
    case 1: *(void **)data = &contexts[range.device]; return 0;
    case 2: *(unsigned *)data = on_device ? 2 : 1; return 0;
    case 3: case 4: *(void **)data = address; return 0;
    case 7: *(unsigned long long *)data = (uintptr_t)range.begin; return 0; /* a buffer's own number */
    case 8: *(unsigned *)data = 0; return 0;
    case 9: *(int *)data = range.device; return 0;
    case 11: *(void **)data = range.begin; return 0;
    case 12: *(size_t *)data = range.size; return 0;
    case 13: *(unsigned *)data = 1; return 0;
    default: return unsupported("cuPointerGetAttribute", cudaErrorNotSupported, 0);
    }
}
int cuMemGetAddressRange_v2(void **begin, size_t *size, void *address) {
    struct range range;
    if (!memory_range(address, &range)) return cudaErrorInvalidValue;
    if (begin) *begin = range.begin;
    if (size) *size = range.size;
    return 0;
}
