/* Sets of address ranges that do not overlap, sorted by address. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

/* Return how many ranges begin at or before the address. */
static size_t rank(const struct ranges *ranges, const char *address) {
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges->items[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

int ranges_insert(struct ranges *ranges, struct range range) {
    if (ranges->count == ranges->capacity) {
        size_t capacity = ranges->capacity ? 2 * ranges->capacity : 256;
        struct range *items = realloc(ranges->items, capacity * sizeof *items);
        if (!items) return 0;
        ranges->items = items, ranges->capacity = capacity;
    }
    size_t index = rank(ranges, range.begin);
    memmove(ranges->items + index + 1, ranges->items + index, (ranges->count - index) * sizeof range);
    ranges->items[index] = range;
    ++ranges->count;
    return 1;
}

struct range *ranges_find(struct ranges *ranges, const void *address) {
    size_t index = rank(ranges, address);
    if (!index) return NULL;
    struct range *range = &ranges->items[index - 1];
    return (const char *)address < range->begin + range->size ? range : NULL;
}

struct range ranges_take(struct ranges *ranges, const void *begin) {
    struct range *found = ranges_find(ranges, begin);
    if (!found || found->begin != begin) return (struct range){0};
    struct range range = *found;
    size_t after = ranges->count - (size_t)(found + 1 - ranges->items);
    memmove(found, found + 1, after * sizeof range);
    --ranges->count;
    return range;
}
