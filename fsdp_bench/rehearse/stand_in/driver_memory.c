/* The CUDA driver (libcuda): memory, and virtual memory, where addresses and the device's pages are apart.
 *
 * PyTorch's expandable segments are made of the latter.
 */
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>

extern cudaError_t cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);
extern cudaError_t cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t);
extern cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);

int cuMemAlloc_v2(void **address, size_t num_bytes) { return cudaMalloc(address, num_bytes); }
int cuMemFree_v2(void *address) { return cudaFree(address); }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return cudaMemGetInfo(free, total); }
int cuMemcpyHtoD_v2(void *to, const void *from, size_t num_bytes) { return cudaMemcpy(to, from, num_bytes, 1); }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t num_bytes) { return cudaMemcpy(to, from, num_bytes, 2); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t num_bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, num_bytes, 1, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t num_bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, num_bytes, 2, stream);
}
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t num_bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, num_bytes, 3, stream);
}
int cuMemsetD8_v2(void *to, unsigned char value, size_t count) { return cudaMemset(to, value, count); }

/* ---- virtual memory: cuMemCreate takes pages of a device, cuMemMap puts them behind addresses */

struct pages {
    size_t num_bytes;
    int device;
    int num_holders; /* the handle and each mapping: the pages are free when both are gone */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ranges mappings;

static void release(struct pages *pages) {
    if (__atomic_sub_fetch(&pages->num_holders, 1, __ATOMIC_ACQ_REL)) return;
    memory_give_pages(pages->num_bytes, pages->device);
    free(pages);
}

int cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties, int option) {
    return (void)properties, (void)option, *granularity = MEMORY_PAGE, 0;
}
int cuMemAddressReserve(void **address, size_t num_bytes, size_t alignment, void *wish, unsigned long long flags) {
    (void)alignment, (void)wish, (void)flags;
    return memory_reserve(address, num_bytes);
}
int cuMemAddressFree(void *address, size_t num_bytes) {
    return (void)num_bytes, memory_release(address) ? 0 : cudaErrorInvalidValue;
}
int cuMemCreate(struct pages **pages, size_t num_bytes, const CUmemAllocationProp *properties,
                unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    if (properties->location.type != 1 /* CU_MEM_LOCATION_TYPE_DEVICE */)
        return unsupported("cuMemCreate", cudaErrorNotSupported, 0); /* of the host */
    if (device_index(device) < 0) return cudaErrorInvalidDevice;
    if (!num_bytes || num_bytes % MEMORY_PAGE) return cudaErrorInvalidValue;
    struct pages *created = malloc(sizeof *created);
    if (!created || !memory_take_pages(num_bytes, device)) return free(created), cudaErrorMemoryAllocation;
    *created = (struct pages){num_bytes, device, 1};
    return *pages = created, 0;
}
int cuMemRelease(struct pages *pages) { return release(pages), 0; }
int cuMemMap(char *address, size_t num_bytes, size_t offset, struct pages *pages, unsigned long long flags) {
    (void)offset, (void)flags;
    pthread_mutex_lock(&lock);
    int is_mapped = !ranges_find(&mappings, address) &&
                    ranges_insert(&mappings, (struct range){address, num_bytes, pages->device, .pages = pages});
    pthread_mutex_unlock(&lock);
    if (!is_mapped) return cudaErrorInvalidValue;
    __atomic_add_fetch(&pages->num_holders, 1, __ATOMIC_ACQ_REL);
    return memory_map(address, pages->device), 0;
}
/* One mapping, or several that follow each other. */
int cuMemUnmap(char *address, size_t num_bytes) {
    for (size_t unmapped = 0; unmapped < num_bytes;) {
        pthread_mutex_lock(&lock);
        struct range mapping = ranges_take(&mappings, address + unmapped);
        pthread_mutex_unlock(&lock);
        if (!mapping.size) return cudaErrorInvalidValue;
        memory_forget(mapping.begin, mapping.size);
        release(mapping.pages);
        unmapped += mapping.size;
    }
    return 0;
}
/* Which devices may read and write: nobody is kept from it here. */
int cuMemSetAccess(void *address, size_t num_bytes, const void *access, size_t count) {
    return (void)address, (void)num_bytes, (void)access, (void)count, 0;
}
