/* Each item to the lightest bucket that has room. */
#include "deal.h"
#include "planning.h"

#include <stdlib.h>
#include <string.h>

/* Returns 1 where an item finds no room; its bucket is -1. */
static int run_lightest(struct deal *d)
{
    if (!d->count)
        return 0;
    size_t buckets = (size_t)d->buckets;
    struct load *heap = malloc(buckets * sizeof *heap);
    struct load *passed = malloc(buckets * sizeof *passed);
    int64_t *counts = calloc(buckets, sizeof(int64_t));
    int64_t *held = calloc(buckets * (size_t)d->kinds + 1, sizeof(int64_t));
    /* The least that any later item takes: a bucket without it never takes one again. */
    int64_t *least = malloc(((size_t)d->count * (size_t)d->kinds + 1) * sizeof(int64_t));
    int result = heap && passed && counts && held && least ? 0 : -1;
    for (int64_t k = 0; !result && k < d->kinds; k++)
        for (int64_t item = d->count - 1; item >= 0; item--) {
            int64_t size = d->sizes[k * d->count + item];
            int64_t *here = &least[k * d->count + item];
            *here = item + 1 < d->count && here[1] < size ? here[1] : size;
        }
    int64_t open = d->buckets;
    for (int64_t bucket = 0; !result && bucket < d->buckets; bucket++)
        heap[bucket] = (struct load){0, bucket};
    for (int64_t item = 0; result >= 0 && item < d->count; item++) {
        int64_t passed_count = 0, bucket = -1;
        while (open) {
            int64_t top = heap[0].number;
            int has_room = counts[top] < d->count_max, is_open = has_room;
            for (int64_t k = 0; k < d->kinds; k++) {
                int64_t left = d->caps[k] - held[top * d->kinds + k];
                has_room &= d->sizes[k * d->count + item] <= left;
                is_open &= least[k * d->count + item] <= left;
            }
            if (has_room) {
                bucket = top;
                break;
            }
            if (is_open)
                passed[passed_count++] = heap[0];
            heap[0] = heap[--open];
            sink(heap, open, 0);
        }
        d->bucket_of[item] = bucket;
        if (bucket < 0)
            result = 1;
        else {
            heap[0].value += d->costs[item];
            sink(heap, open, 0);
            counts[bucket]++;
            for (int64_t k = 0; k < d->kinds; k++)
                held[bucket * d->kinds + k] += d->sizes[k * d->count + item];
            d->loads[bucket] += d->costs[item];
        }
        while (passed_count) {
            heap[open] = passed[--passed_count];
            lift(heap, open++);
        }
    }
    free(heap);
    free(passed);
    free(counts);
    free(held);
    free(least);
    return result;
}

PyObject *deal_lightest(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[5];
    struct deal d;
    long long count_max;
    memset(&d, 0, sizeof d);
    if (!PyArg_ParseTuple(args, "OOOLOO", &objects[0], &objects[1], &objects[2], &count_max,
                          &objects[3], &objects[4]))
        return NULL;
    struct buffers held = {.count = 0};
    if (take_deal(&d, &held, objects))
        return NULL;
    d.count_max = count_max;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = run_lightest(&d);
    Py_END_ALLOW_THREADS
    release_buffers(&held);
    if (result < 0)
        return PyErr_NoMemory();
    return PyBool_FromLong(!result);
}
