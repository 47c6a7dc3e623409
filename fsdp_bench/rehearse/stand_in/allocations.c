/* CUDA's runtime: cudaMalloc, pinned memory, and where a pointer points. */
#include "stand_in.h"

cudaError_t cudaMalloc(void **address, size_t num_bytes) {
    if (!device_count()) return failed(cudaErrorNoDevice);
    if (!num_bytes) return *address = NULL, cudaSuccess;
    *address = memory_allocate(num_bytes, device_current());
    return *address ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
    device_use(device_current()); /* cudaFree(NULL) is how programs make a context */
    if (!address) return cudaSuccess;
    struct range range;
    if (!memory_range(address, &range)) return failed(cudaErrorInvalidValue);
    host_waits_for_device(range.device); /* as cudaFree does */
    return memory_release(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    if (!device_count()) return failed(cudaErrorNoDevice);
    device_use(device_current());
    *total = settings_gpu()->total_bytes;
    size_t used = memory_used(device_current());
    *free = used < *total ? *total - used : 0;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t num_bytes, unsigned flags) {
    (void)flags;
    return (*address = pinned_allocate(num_bytes)) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void **address, size_t num_bytes) { return cudaHostAlloc(address, num_bytes, 0); }
cudaError_t cudaFreeHost(void *address) {
    return !address || pinned_release(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void *address, size_t num_bytes, unsigned flags) {
    (void)flags;
    return pinned_register(address, num_bytes) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostUnregister(void *address) {
    return pinned_release(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *address, unsigned flags) {
    (void)flags;
    struct range range;
    if (!pinned_range(address, &range)) return failed(cudaErrorInvalidValue);
    return *device_pointer = address, cudaSuccess;
}
cudaError_t cudaHostGetFlags(unsigned *flags, void *address) {
    struct range range;
    if (!pinned_range(address, &range)) return failed(cudaErrorInvalidValue);
    return *flags = 0, cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct range range;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -1};
    if (memory_range(address, &range)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = range.device;
        attributes->devicePointer = (void *)address;
    } else if (pinned_range(address, &range)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = range.device;
        attributes->devicePointer = attributes->hostPointer = (void *)address;
    } else {
        attributes->hostPointer = (void *)address;
    }
    return cudaSuccess;
}
