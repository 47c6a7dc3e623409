/* Memory of the devices: addresses that the kernel backs with host pages only where something is written.
 *
 * STAND_IN_BYTES is what a device has; STAND_IN_CONTEXT_BYTES of it are used by the context.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define ADDRESSES ((size_t)64 << 40)

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

size_t memory_used(int device) { return device_is_used(device) ? used[device] + settings_gpu()->context_bytes : 0; }
size_t memory_peak(int device) { return device_is_used(device) ? peak[device] + settings_gpu()->context_bytes : 0; }

/* Addresses grow and are not used twice; the allocator takes the lowest of equal blocks. */
static char *reserve(size_t size) {
    if (!first) {
        char *begin = mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (begin == MAP_FAILED) return NULL;
        next = begin + (MEMORY_PAGE - (uintptr_t)begin % MEMORY_PAGE) % MEMORY_PAGE;
        end = begin + ADDRESSES;
        first = begin;
    }
    if (size > (size_t)(end - next) || mprotect(next, size, PROT_READ | PROT_WRITE)) return NULL;
    char *begin = next;
    next += size;
    return begin;
}

static void *handed_out(size_t num_bytes, int device, int has_pages) {
    if (num_bytes > ADDRESSES) return NULL;
    size_t size = (num_bytes + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
    pthread_mutex_lock(&lock);
    char *begin = !has_pages || take_pages(size, device) ? reserve(size) : NULL;
    if (begin) ranges_insert(&allocations, (struct range){begin, size, device, has_pages, 1});
    pthread_mutex_unlock(&lock);
    return begin;
}

void *memory_allocate(size_t num_bytes, int device) { return handed_out(num_bytes, device, 1); }

void *memory_reserve(size_t num_bytes) { return handed_out(num_bytes, 0, 0); }

int memory_release(void *address) {
    pthread_mutex_lock(&lock);
    struct range range = ranges_take(&allocations, address);
    if (range.has_pages) used[range.device] -= range.size;
    pthread_mutex_unlock(&lock);
    if (range.size) {
        madvise(address, range.size, MADV_DONTNEED);
        mprotect(address, range.size, PROT_NONE);
    }
    return range.size != 0;
}

int memory_holds(const void *address) { return first && (const char *)address >= first && (const char *)address < end; }

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
    int inserted = ranges_insert(&pinned, (struct range){address, num_bytes, device_current(), 1, is_own});
    pthread_mutex_unlock(&lock);
    return inserted;
}

int pinned_register(void *address, size_t num_bytes) { return pin(address, num_bytes, 0); }

void *pinned_allocate(size_t num_bytes) {
    if (!num_bytes) num_bytes = 1;
    void *address = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return NULL;
    return pin(address, num_bytes, 1) ? address : NULL;
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
