/* One forward, one backward: when pipelines end. */
#include "planning.h"

#include <stdlib.h>
#include <string.h>

/* When the last backward of the first stage ends, and all others with it; `times` has room for
 * 2 * stages * count. Stage s runs stages - 1 - s forwards ahead, then one forward and one backward
 * in turn, then the backwards that are left. */
static int64_t makespan(const int64_t *costs, int64_t count, int64_t stages, int64_t *times,
                        int64_t *steps, int64_t *free_at)
{
    int64_t *forward = times, *backward = times + stages * count;
    memset(steps, 0, (size_t)stages * sizeof(int64_t));
    memset(free_at, 0, (size_t)stages * sizeof(int64_t));
    for (int64_t k = 0; k < 2 * stages * count; k++)
        times[k] = -1;
    int64_t end = 0, left = 2 * stages * count;
    while (left) {
        for (int64_t s = 0; s < stages; s++) {
            int64_t ahead = stages - 1 - s < count ? stages - 1 - s : count;
            for (;; left--) {
                int64_t step = steps[s], j, ready;
                if (step == 2 * count)
                    break;
                int is_forward = step < ahead || (step < 2 * count - ahead && !((step - ahead) & 1));
                if (is_forward) {
                    j = step < ahead ? step : ahead + (step - ahead) / 2;
                    ready = s ? forward[(s - 1) * count + j] : 0;
                } else {
                    j = step < 2 * count - ahead ? (step - ahead) / 2 : step - count;
                    ready = s + 1 < stages ? backward[(s + 1) * count + j] : forward[s * count + j];
                }
                if (ready < 0)
                    break;
                if (free_at[s] < ready)
                    free_at[s] = ready;
                int64_t cost = costs[s * count + j];
                free_at[s] += is_forward ? cost : 2 * cost;
                (is_forward ? forward : backward)[s * count + j] = free_at[s];
                steps[s]++;
                end = free_at[s] > end ? free_at[s] : end;
            }
        }
    }
    return end;
}

PyObject *makespans(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[2];
    long long stages;
    if (!PyArg_ParseTuple(args, "OLO", &objects[0], &stages, &objects[1]))
        return NULL;
    struct buffers held = {.count = 0};
    int64_t items = -1, groups = -1, *costs, *found;
    if (!(costs = take(&held, objects[0], "costs", 0, &items)) ||
        !(found = take(&held, objects[1], "found", 1, &groups))) {
        release_buffers(&held);
        return NULL;
    }
    if (stages < 1 || stages > 1 << 20 || groups < 1 || items < groups * stages ||
        items % (groups * stages)) {
        refuse(&held, "costs are no microbatches of the stages of the groups");
        return NULL;
    }
    int64_t count = items / (groups * stages);
    int64_t *room = malloc(((size_t)stages * (size_t)count + (size_t)stages) * 2 * sizeof(int64_t));
    if (!room) {
        release_buffers(&held);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t *steps = room + 2 * stages * count;
    for (int64_t group = 0; group < groups; group++)
        found[group] = makespan(costs + group * stages * count, count, stages, room, steps,
                                steps + stages);
    Py_END_ALLOW_THREADS
    free(room);
    release_buffers(&held);
    Py_RETURN_NONE;
}
