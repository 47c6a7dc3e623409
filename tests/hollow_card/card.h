/* A card without silicon: CUDA's runtime as far as PyTorch calls it, where memory is an address and a kernel nothing. */
#pragma once
#include <stddef.h>
#include <stdint.h>

const char *card_name(void); /* runtime.c */

#define MEMORY_PAGE ((size_t)2 << 20)

/* memory.c: the card's memory, handed out and counted, never touched. */
void *memory_allocate(size_t num_bytes); /* NULL: the card is full */
void *memory_reserve(size_t num_bytes);  /* addresses alone */
int memory_take_pages(size_t num_bytes); /* 0: the card is full */
void memory_give_pages(size_t num_bytes);
int memory_release(void *address);         /* 0: no such address */
int memory_holds(const void *address);   /* whether the card, not the host, has it */
size_t memory_total(void);
size_t memory_used(void);
int memory_is_used(void); /* by this process */

void *pinned_allocate(size_t num_bytes);
void pinned_register(void *address, size_t num_bytes);
int pinned_release(void *address);
int pinned_holds(const void *address);

/* order.c: streams and events. How far the card is, the host knows only by what it waited for. */
struct stream;
struct event;
struct stream *order_stream(void *handle); /* of the handle that CUDA's callers hold; NULL is the default stream */
struct stream *order_new_stream(int priority);
int order_priority(const struct stream *stream);
struct event *order_new_event(void);
void order_record(struct event *event, struct stream *stream);
void order_wait(struct stream *stream, const struct event *event); /* later work of the stream waits */
int order_happened(const struct event *event);
int order_idle(const struct stream *stream);
void order_join_event(const struct event *event);    /* the host waits */
void order_join_stream(const struct stream *stream); /* the host waits */
void order_join_all(void);                           /* the host waits */
