/* CUDA's runtime: devices, errors, versions.
 *
 * As with NVIDIA's, a process that was forked after its parent used a device cannot use any.
 */
#include "stand_in.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread cudaError_t last_error;
static __thread int current;
static int visible[MAX_DEVICES], num_visible; /* indices on the machine, by ordinal */
static char used[MAX_DEVICES];                /* by ordinal: has a context */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_forked; /* from a process that had a context */

cudaError_t failed(cudaError_t error) { return last_error = error; }

static void after_fork(void) {
    for (int ordinal = 0; ordinal < MAX_DEVICES; ++ordinal) is_forked |= used[ordinal];
}

/* CUDA_VISIBLE_DEVICES: indices, up to the first that is none. Unset: all devices. */
static void find_visible(void) {
    pthread_atfork(NULL, NULL, after_fork);
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int count = settings_gpu()->count;
    if (!text) {
        for (int index = 0; index < count; ++index) visible[num_visible++] = index;
        return;
    }
    for (char *end; *text && num_visible < count; text = end + 1) {
        long index = strtol(text, &end, 10);
        if (end == text || index < 0 || index >= count) return;
        visible[num_visible++] = (int)index;
        if (*end != ',') return;
    }
}

int device_count(void) {
    pthread_once(&once, find_visible);
    return num_visible;
}
int device_index(int ordinal) { return ordinal >= 0 && ordinal < device_count() ? visible[ordinal] : -1; }
int device_ordinal(int index) {
    for (int ordinal = 0; ordinal < device_count(); ++ordinal)
        if (visible[ordinal] == index) return ordinal;
    return -1;
}
int device_current(void) { return current; }
void device_set_current(int ordinal) { current = ordinal; }
int device_is_used(int ordinal) { return __atomic_load_n(&used[ordinal], __ATOMIC_RELAXED); }
void device_use(int ordinal) { __atomic_store_n(&used[ordinal], 1, __ATOMIC_RELAXED); }

cudaError_t device_error(void) {
    if (is_forked) return failed(cudaErrorInitializationError);
    return device_count() ? cudaSuccess : failed(cudaErrorNoDevice);
}

/* The error of a call that names a device, and success for one that exists. */
static cudaError_t checked(int device) {
    cudaError_t error = device_error();
    if (error) return error;
    return device_index(device) < 0 ? failed(cudaErrorInvalidDevice) : cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) { return *count = device_count(), device_error(); }
cudaError_t cudaGetDevice(int *device) {
    return *device = current, device_error();
}
cudaError_t cudaSetDevice(int device) {
    cudaError_t error = checked(device);
    if (!error) device_use(current = device); /* since CUDA 12 it makes the context */
    return error;
}
cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    cudaError_t error = checked(device);
    if (!error) device_use(device);
    return error;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned *flags) { return *flags = 0, cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned flags) { return (void)flags, cudaSuccess; }

/* CUDA 13's name is CUDA 12's with _v2; CUDA 12's without fills in the layout of CUDA 11, which nobody builds for. */
#if CUDA_VERSION >= 13000
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
#else
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
#endif
    cudaError_t error = checked(device);
    if (!error) fill_properties(properties, device);
    return error;
}
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    cudaError_t error = checked(device);
    if (!error) *value = device_attribute(attribute, device);
    return error;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    cudaError_t error = checked(device);
    if (!error) snprintf(id, (size_t)length, "0000:%02X:00.0", (unsigned)(device_index(device) + 1));
    return error;
}

/* Peers are not reached. It matters only to a process with several devices: PyTorch's copies between them. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    cudaError_t error = checked(device);
    return *can = 0, error ? error : checked(peer);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    if (capturing()) return failed(cudaErrorStreamCaptureUnsupported);
    return host_waits_for_device(current), cudaSuccess;
}
/* Stack, heap and printf buffers of kernels, preferences of caches: no kernel runs. On a GPU larger limits take memory
 * of the context, which is assumed as a whole (STAND_IN_CONTEXT_BYTES). */
cudaError_t cudaDeviceSetLimit(int limit, size_t value) { return (void)limit, (void)value, cudaSuccess; }
cudaError_t cudaDeviceSetCacheConfig(int config) { return (void)config, cudaSuccess; }

/* ---- errors: NVIDIA's names and texts */

static const struct {
    cudaError_t error;
    const char *name, *text;
} ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t index = 0; index < sizeof ERRORS / sizeof *ERRORS; ++index)
        if (ERRORS[index].error == error) return ERRORS[index].name;
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (size_t index = 0; index < sizeof ERRORS / sizeof *ERRORS; ++index)
        if (ERRORS[index].error == error) return ERRORS[index].text;
    static __thread char text[40];
    snprintf(text, sizeof text, "unrecognized error code %d", (int)error);
    return text;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
