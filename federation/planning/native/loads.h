/* Loads of numbered buckets: their order, a stable sort and a heap of them. */
#ifndef MSD_LOADS_H
#define MSD_LOADS_H

#include <stdint.h>

struct load {
    int64_t value, number;
};

static inline int by_load(const void *a, const void *b)
{
    const struct load *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

/* Stable merge sort by `value`, rising; `number`s rise within equal ones if they did before. */
void sort_loads(struct load *at, struct load *spare, int64_t count);

/* Let the entry at a place of a heap, the lightest on top, find its place below or above. */
static inline void sink(struct load *heap, int64_t count, int64_t at)
{
    struct load moved = heap[at];
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && by_load(&heap[child + 1], &heap[child]) < 0)
            child++;
        if (by_load(&moved, &heap[child]) <= 0)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

static inline void lift(struct load *heap, int64_t at)
{
    struct load moved = heap[at];
    while (at > 0 && by_load(&moved, &heap[(at - 1) / 2]) < 0) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = moved;
}

#endif
