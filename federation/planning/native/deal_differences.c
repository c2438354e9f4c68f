/* Largest differencing with equal counts (Karmarkar and Karp). */
#include "loads.h"
#include "planning.h"

#include <stdlib.h>

/* A slot is a sum and a chain of items, from head to tail. Sorts by falling sum, ties as they stood. */
static void sort_slots(struct load *slots, int64_t *heads, int64_t *tails, struct load *spare,
                       int64_t *chains, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        slots[k] = (struct load){-slots[k].value, k};
        chains[k] = heads[k];
        chains[count + k] = tails[k];
    }
    sort_loads(slots, spare, count);
    for (int64_t k = 0; k < count; k++) {
        int64_t from = slots[k].number;
        slots[k].value = -slots[k].value;
        heads[k] = chains[from];
        tails[k] = chains[count + from];
    }
}

static int run_differencing(const int64_t *costs, int64_t count, int64_t buckets, int64_t *found)
{
    int64_t states = count / buckets;
    struct load *slots = malloc(((size_t)count + (size_t)buckets) * sizeof *slots);
    struct load *heap = malloc((size_t)states * sizeof *heap);
    int64_t *chains = malloc(((size_t)count * 3 + 2 * (size_t)buckets) * sizeof(int64_t));
    int64_t *place_of = malloc(2 * (size_t)states * sizeof(int64_t));
    if (!slots || !heap || !chains || !place_of) {
        free(slots);
        free(heap);
        free(chains);
        free(place_of);
        return -1;
    }
    int64_t *heads = chains, *tails = chains + count, *next = chains + 2 * count;
    int64_t *spare_chains = chains + 3 * count;
    for (int64_t item = 0; item < count; item++) {
        slots[item].value = costs[item];
        heads[item] = tails[item] = item;
        next[item] = -1;
    }
    /* The heap has (-spread, number), so the widest comes first, ties by number. */
    for (int64_t state = 0; state < states; state++) {
        place_of[state] = state;
        int64_t first = state * buckets;
        heap[state] = (struct load){costs[first + buckets - 1] - costs[first], state};
    }
    for (int64_t k = states / 2; k >= 0; k--)
        sink(heap, states, k);
    int64_t open = states, number = states;
    while (open > 1) {
        int64_t wide = place_of[heap[0].number] * buckets;
        heap[0] = heap[--open];
        sink(heap, open, 0);
        int64_t other = place_of[heap[0].number] * buckets;
        for (int64_t k = 0; k < buckets; k++) {
            int64_t from = other + buckets - 1 - k, to = wide + k;
            slots[to].value += slots[from].value;
            next[tails[to]] = heads[from];
            tails[to] = tails[from];
        }
        sort_slots(slots + wide, heads + wide, tails + wide, slots + count, spare_chains, buckets);
        place_of[number] = wide / buckets;
        heap[0] = (struct load){slots[wide + buckets - 1].value - slots[wide].value, number++};
        sink(heap, open, 0);
    }
    int64_t last = place_of[heap[0].number] * buckets;
    for (int64_t k = 0; k < buckets; k++)
        for (int64_t item = heads[last + k]; item >= 0; item = next[item])
            found[item] = k;
    free(slots);
    free(heap);
    free(chains);
    free(place_of);
    return 0;
}

PyObject *deal_differences(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[2];
    long long buckets;
    if (!PyArg_ParseTuple(args, "OLO", &objects[0], &buckets, &objects[1]))
        return NULL;
    struct buffers held = {.count = 0};
    int64_t count = -1, *costs, *found;
    if (!(costs = take(&held, objects[0], "costs", 0, &count)) ||
        !(found = take(&held, objects[1], "found", 1, &count))) {
        release_buffers(&held);
        return NULL;
    }
    if (buckets < 1 || count < 1 || count % buckets) {
        refuse(&held, "costs are no multiple of the buckets");
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_differencing(costs, count, buckets, found);
    Py_END_ALLOW_THREADS
    return ended(&held, failed);
}
