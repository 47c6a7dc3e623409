/* CUDA's runtime: cudaMalloc, pinned memory, and where a pointer points.
 *
 * Refused by name: cudaMallocAsync and its pools, as how they grow is not documented; cudaMallocManaged, whose pages
 * move between host and device; cudaIpc*, as there are no other ranks.
 */
#include "stand_in.h"

/* Whole pages of 2 MiB, which is what PyTorch asks for. Smaller allocations share pages on a GPU; here they do not. */
cudaError_t cudaMalloc(void **address, size_t num_bytes) {
    if (device_error()) return device_error();
    if (!num_bytes) return *address = NULL, cudaSuccess;
    cudaError_t error = memory_allocate(address, num_bytes, device_current());
    return error ? failed(error) : cudaSuccess;
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
    if (device_error()) return device_error();
    device_use(device_current());
    *total = settings_gpu()->total_bytes;
    return *free = memory_free(device_current()), cudaSuccess;
}

/* Pinned memory is the host's; its flags (portable, mapped, write-combined) say how a GPU reads it, which none does. */
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
