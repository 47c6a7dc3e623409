/* Memory of the devices: addresses that the kernel backs with host pages only where something is written.
 *
 * STAND_IN_BYTES is what a device has; STAND_IN_CONTEXT_BYTES of it are used by the context.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_ADDRESSES ((size_t)64 << 40)
#define FEWEST_ADDRESSES ((size_t)1 << 40) /* several times the memory of any GPU: expandable segments reserve it */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ranges allocations, pinned;
static size_t used[MAX_DEVICES], peak[MAX_DEVICES]; /* without the context */
static char *first, *next, *end;                    /* of all addresses of all devices */

static int take_pages(size_t size, int device) {
    const struct gpu *gpu = settings_gpu();
    device_use(device);
    if (used[device] + gpu->context_bytes + size > gpu->total_bytes) return 0;
    used[device] += size;
    if (peak[device] < used[device]) peak[device] = used[device];
    return 1;
}

int memory_take_pages(size_t num_bytes, int device) {
    pthread_mutex_lock(&lock);
    int taken = take_pages(num_bytes, device);
    pthread_mutex_unlock(&lock);
    return taken;
}

void memory_give_pages(size_t num_bytes, int device) {
    pthread_mutex_lock(&lock);
    used[device] -= num_bytes;
    pthread_mutex_unlock(&lock);
}

static size_t with_context(const size_t *counter, int device) {
    if (!device_is_used(device)) return 0;
    pthread_mutex_lock(&lock);
    size_t num_bytes = counter[device];
    pthread_mutex_unlock(&lock);
    return num_bytes + settings_gpu()->context_bytes;
}
size_t memory_used(int device) { return with_context(used, device); }
size_t memory_peak(int device) { return with_context(peak, device); }
size_t memory_free(int device) {
    size_t total = settings_gpu()->total_bytes, taken = memory_used(device);
    return taken < total ? total - taken : 0; /* the context alone may need more than a small GPU has */
}

/* Ask the kernel for all addresses at once: as many as it gives. */
static int find_addresses(void) {
    size_t size = MOST_ADDRESSES;
    char *begin;
    while ((begin = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) == MAP_FAILED)
        if ((size /= 2) < FEWEST_ADDRESSES) return 0;
    end = begin + size;
    next = begin + (MEMORY_PAGE - (uintptr_t)begin % MEMORY_PAGE) % MEMORY_PAGE;
    return __atomic_store_n(&first, next, __ATOMIC_RELEASE), 1; /* last: memory_holds reads it without the lock */
}

/* Addresses grow; the allocator takes the lowest of equal blocks. When they are used up, those that were given back are
 * used again, the lowest first. */
static char *unused_addresses(size_t size) {
    if (!first && !find_addresses()) return NULL;
    if (size <= (size_t)(end - next)) return next;
    char *begin = first;
    for (size_t index = 0; index < allocations.count; ++index) {
        const struct range *range = &allocations.items[index];
        if (size <= (size_t)(range->begin - begin)) return begin;
        begin = range->begin + range->size;
    }
    return size <= (size_t)(end - begin) ? begin : NULL;
}

/* Put addresses behind a new range, which already has its pages of the device; under the lock. */
static int insert(struct range *range) {
    range->begin = unused_addresses(range->size);
    if (!range->begin || mprotect(range->begin, range->size, PROT_READ | PROT_WRITE)) return 0;
    if (!ranges_insert(&allocations, *range)) return 0;
    if (next < range->begin + range->size) next = range->begin + range->size;
    return 1;
}

static cudaError_t hand_out(void **address, size_t num_bytes, int device, int has_pages) {
    if (num_bytes > MOST_ADDRESSES) return cudaErrorMemoryAllocation;
    struct range range = {.device = device, .has_pages = has_pages, .is_own = 1};
    range.size = (num_bytes + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
    pthread_mutex_lock(&lock);
    int is_full = has_pages && !take_pages(range.size, device), is_refused = !is_full && !insert(&range);
    if (is_refused && has_pages) used[device] -= range.size;
    pthread_mutex_unlock(&lock);
    if (is_full) return cudaErrorMemoryAllocation;
    if (is_refused) { /* not the GPU is full: "out of memory" would be a wrong answer */
        fprintf(stderr, "fsdp-bench rehearse: this machine has no addresses for %zu bytes of GPU memory (%s); "
                "see ulimit -v and vm.overcommit_memory\n", num_bytes, strerror(errno));
        return cudaErrorUnknown;
    }
    return *address = range.begin, cudaSuccess;
}

cudaError_t memory_allocate(void **address, size_t num_bytes, int device) {
    return hand_out(address, num_bytes, device, 1);
}
cudaError_t memory_reserve(void **address, size_t num_bytes) { return hand_out(address, num_bytes, 0, 0); }

int memory_release(void *address) {
    pthread_mutex_lock(&lock);
    struct range range = ranges_take(&allocations, address);
    if (range.has_pages) used[range.device] -= range.size;
    if (range.size) { /* under the lock: the addresses may be handed out again */
        memory_forget(address, range.size);
        mprotect(address, range.size, PROT_NONE);
    }
    pthread_mutex_unlock(&lock);
    return range.size != 0;
}

void memory_forget(void *address, size_t num_bytes) { madvise(address, num_bytes, MADV_DONTNEED); }

int memory_holds(const void *address) {
    const char *begin = __atomic_load_n(&first, __ATOMIC_ACQUIRE);
    return begin && (const char *)address >= begin && (const char *)address < end;
}

static int found(struct ranges *ranges, const void *address, struct range *range) {
    pthread_mutex_lock(&lock);
    struct range *item = ranges_find(ranges, address);
    if (item) *range = *item;
    pthread_mutex_unlock(&lock);
    return item != NULL;
}

int memory_range(const void *address, struct range *range) { return found(&allocations, address, range); }

/* Pages of a device lie behind these addresses from now on. */
void memory_map(void *address, int device) {
    pthread_mutex_lock(&lock);
    struct range *range = ranges_find(&allocations, address);
    if (range) range->device = device;
    pthread_mutex_unlock(&lock);
}

/* ---- pinned host memory */

static int pin(void *address, size_t num_bytes, int is_own) {
    pthread_mutex_lock(&lock);
    struct range range = {address, num_bytes, device_current(), .has_pages = 1, .is_own = is_own};
    int inserted = ranges_insert(&pinned, range);
    pthread_mutex_unlock(&lock);
    return inserted;
}

int pinned_register(void *address, size_t num_bytes) { return pin(address, num_bytes, 0); }

void *pinned_allocate(size_t num_bytes) {
    if (!num_bytes) num_bytes = 1;
    void *address = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return NULL;
    if (pin(address, num_bytes, 1)) return address;
    return munmap(address, num_bytes), NULL;
}

int pinned_release(void *address) {
    pthread_mutex_lock(&lock);
    struct range range = ranges_take(&pinned, address);
    pthread_mutex_unlock(&lock);
    if (range.is_own) munmap(address, range.size);
    return range.size != 0;
}

int pinned_range(const void *address, struct range *range) { return found(&pinned, address, range); }

/* ---- for Python */

__attribute__((visibility("default"))) size_t stand_in_used_bytes(int device) {
    return device_index(device) < 0 ? 0 : memory_used(device);
}
__attribute__((visibility("default"))) size_t stand_in_peak_bytes(int device) {
    return device_index(device) < 0 ? 0 : memory_peak(device);
}
