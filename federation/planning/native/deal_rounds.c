/* A deal in rounds: equally many items to each bucket. */
#include "loads.h"
#include "planning.h"

#include <stdlib.h>

static int run_rounds(const int64_t *costs, int64_t count, int64_t *loads, int64_t buckets,
                      int64_t head_rounds, int64_t head_weight, int64_t *found)
{
    struct load *order = malloc((size_t)buckets * 2 * sizeof *order);
    if (!order)
        return -1;
    for (int64_t bucket = 0; bucket < buckets; bucket++)
        order[bucket] = (struct load){loads[bucket], bucket};
    for (int64_t start = 0; start < count; start += buckets) {
        int64_t weight = start / buckets < head_rounds ? head_weight : 1;
        sort_loads(order, order + buckets, buckets);
        for (int64_t k = 0; k < buckets; k++) {
            found[start + k] = order[k].number;
            order[k].value += weight * costs[start + k];
        }
    }
    for (int64_t k = 0; k < buckets; k++)
        loads[order[k].number] = order[k].value;
    free(order);
    return 0;
}

PyObject *deal_rounds(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[3];
    long long head_rounds, head_weight;
    if (!PyArg_ParseTuple(args, "OOLLO", &objects[0], &objects[1], &head_rounds, &head_weight,
                          &objects[2]))
        return NULL;
    struct buffers held = {.count = 0};
    int64_t count = -1, buckets = -1, *costs, *loads, *found;
    if (!(costs = take(&held, objects[0], "costs", 0, &count)) ||
        !(loads = take(&held, objects[1], "loads", 1, &buckets)) ||
        !(found = take(&held, objects[2], "found", 1, &count))) {
        release_buffers(&held);
        return NULL;
    }
    if (buckets < 1 || count % buckets) {
        refuse(&held, "costs are no multiple of the buckets");
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_rounds(costs, count, loads, buckets, head_rounds, head_weight, found);
    Py_END_ALLOW_THREADS
    return ended(&held, failed);
}
