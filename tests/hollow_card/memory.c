/* The card's memory: addresses that the kernel backs with pages only where something is written.
 *
 * HOLLOW_CARD_BYTES is what the card has. The driver gives cudaMalloc whole pages of 2 MiB; what a context holds beside
 * is HOLLOW_CONTEXT_BYTES.
 */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE MEMORY_PAGE
#define SLOTS (1 << 16)
#define ADDRESSES ((size_t)64 << 40)

struct range {
    char *begin;
    size_t size;
    int has_pages;
};
struct ranges {
    struct range slots[SLOTS];
    size_t count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ranges card, pinned;
static size_t used;

static size_t from_environment(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

size_t memory_total(void) { return from_environment("HOLLOW_CARD_BYTES", (size_t)80 << 30); }

size_t memory_used(void) { return used + from_environment("HOLLOW_CONTEXT_BYTES", 0); }

int memory_is_used(void) { return used > 0; }

static void insert(struct ranges *ranges, char *begin, size_t size, int has_pages) {
    if (ranges->count == SLOTS) abort();
    ranges->slots[ranges->count++] = (struct range){begin, size, has_pages};
}

static struct range *find(struct ranges *ranges, const char *address) {
    for (size_t index = ranges->count; index-- > 0;) {
        struct range *range = &ranges->slots[index];
        if (range->begin <= address && address < range->begin + range->size) return range;
    }
    return NULL;
}

static struct range take(struct ranges *ranges, char *begin) {
    struct range *found = find(ranges, begin);
    if (!found || found->begin != begin) return (struct range){0};
    struct range range = *found;
    *found = ranges->slots[--ranges->count];
    return range;
}

static int holds(struct ranges *ranges, const void *address) {
    pthread_mutex_lock(&lock);
    int found = find(ranges, address) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

static int take_pages(size_t size) {
    if (memory_used() + size > memory_total()) return 0;
    used += size;
    return 1;
}

int memory_take_pages(size_t num_bytes) {
    pthread_mutex_lock(&lock);
    int taken = take_pages(num_bytes);
    pthread_mutex_unlock(&lock);
    return taken;
}

void memory_give_pages(size_t num_bytes) {
    pthread_mutex_lock(&lock);
    used -= num_bytes;
    pthread_mutex_unlock(&lock);
}

/* Addresses grow and are not used twice; the allocator takes the lowest of equal blocks. */
static char *reserve(size_t size) {
    static char *next, *end;
    if (!next) {
        char *begin = mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (begin == MAP_FAILED) return NULL;
        next = begin + (PAGE - (uintptr_t)begin % PAGE) % PAGE;
        end = begin + ADDRESSES;
    }
    if (size > (size_t)(end - next) || mprotect(next, size, PROT_READ | PROT_WRITE)) return NULL;
    char *begin = next;
    next += size;
    return begin;
}

static void *handed_out(size_t num_bytes, int with_pages) {
    size_t size = (num_bytes + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&lock);
    char *begin = !with_pages || take_pages(size) ? reserve(size) : NULL;
    if (begin) insert(&card, begin, size, with_pages);
    pthread_mutex_unlock(&lock);
    return begin;
}

void *memory_allocate(size_t num_bytes) { return handed_out(num_bytes, 1); }

void *memory_reserve(size_t num_bytes) { return handed_out(num_bytes, 0); }

int memory_release(void *address) {
    pthread_mutex_lock(&lock);
    struct range range = take(&card, address);
    if (range.has_pages) used -= range.size;
    pthread_mutex_unlock(&lock);
    if (range.size) {
        madvise(address, range.size, MADV_DONTNEED);
        mprotect(address, range.size, PROT_NONE);
    }
    return range.size != 0;
}

int memory_holds(const void *address) { return holds(&card, address); }

void pinned_register(void *address, size_t num_bytes) {
    pthread_mutex_lock(&lock);
    insert(&pinned, address, num_bytes, 0);
    pthread_mutex_unlock(&lock);
}

void *pinned_allocate(size_t num_bytes) {
    void *address = mmap(NULL, num_bytes ? num_bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return NULL;
    pinned_register(address, num_bytes ? num_bytes : 1);
    return address;
}

int pinned_release(void *address) {
    pthread_mutex_lock(&lock);
    size_t size = take(&pinned, address).size;
    pthread_mutex_unlock(&lock);
    return size != 0;
}

int pinned_holds(const void *address) { return holds(&pinned, address); }
