/* Heavy buckets give items to light ones or trade them, within caps. */
#include "deal.h"
#include "planning.h"

#include <stdlib.h>
#include <string.h>

static void close_deal(struct deal *d)
{
    free(d->held);
    free(d->counts);
    free(d->starts);
    free(d->members);
    free(d->order);
}

static int open_deal(struct deal *d)
{
    size_t buckets = (size_t)d->buckets;
    d->held = calloc(buckets * (size_t)d->kinds + 1, sizeof(int64_t));
    d->counts = calloc(buckets, sizeof(int64_t));
    d->starts = malloc((buckets + 1) * sizeof(int64_t));
    d->members = malloc(((size_t)d->count + 1) * sizeof(int64_t));
    d->order = malloc(buckets * 2 * sizeof *d->order);
    if (!d->held || !d->counts || !d->starts || !d->members || !d->order) {
        close_deal(d);
        return -1;
    }
    for (int64_t item = 0; item < d->count; item++)
        for (int64_t kind = 0; kind < d->kinds; kind++)
            d->held[d->bucket_of[item] * d->kinds + kind] += d->sizes[kind * d->count + item];
    return 0;
}

static void list_members(struct deal *d)
{
    memset(d->counts, 0, (size_t)d->buckets * sizeof(int64_t));
    for (int64_t item = d->pinned; item < d->count; item++)
        d->counts[d->bucket_of[item]]++;
    int64_t total = 0;
    for (int64_t bucket = 0; bucket < d->buckets; bucket++) {
        d->starts[bucket] = total;
        total += d->counts[bucket];
    }
    d->starts[d->buckets] = total;
    memset(d->counts, 0, (size_t)d->buckets * sizeof(int64_t));
    for (int64_t item = d->pinned; item < d->count; item++) {
        int64_t bucket = d->bucket_of[item];
        d->members[d->starts[bucket] + d->counts[bucket]++] = item;
    }
}

/* True where `heavy` may give item `mine` and take `theirs` (-1: nothing). */
static int fits(const struct deal *d, int64_t heavy, int64_t light, int64_t mine, int64_t theirs)
{
    for (int64_t kind = 0; kind < d->kinds; kind++) {
        int64_t change = d->sizes[kind * d->count + mine] -
                         (theirs < 0 ? 0 : d->sizes[kind * d->count + theirs]);
        if (change > 0 ? d->held[light * d->kinds + kind] + change > d->caps[kind]
                       : d->held[heavy * d->kinds + kind] - change > d->caps[kind])
            return 0;
    }
    return 1;
}

static int64_t distance(int64_t a, int64_t b) { return a < b ? b - a : a - b; }

struct swap {
    int64_t mine, theirs, off;
};

static void try_swap(const struct deal *d, int64_t heavy, int64_t light, int64_t gap, int64_t mine,
                     int64_t theirs, struct swap *best)
{
    int64_t moved = d->costs[mine] - (theirs < 0 ? 0 : d->costs[theirs]);
    int64_t off = distance(gap, 2 * moved);
    if (off < best->off && fits(d, heavy, light, mine, theirs))
        *best = (struct swap){mine, theirs, off};
}

static int exchange_pair(struct deal *d, int64_t heavy, int64_t light)
{
    int64_t gap = d->loads[heavy] - d->loads[light];
    struct swap best = {-1, -1, gap};
    const int64_t *theirs = d->members + d->starts[light];
    int64_t their_count = d->counts[light];
    int may_move = d->may_move && their_count < d->count_max;
    for (int64_t k = 0; k < d->counts[heavy]; k++) {
        int64_t mine = d->members[d->starts[heavy] + k];
        if (may_move)
            try_swap(d, heavy, light, gap, mine, -1, &best);
        int64_t wanted = d->costs[mine] - gap / 2, low = 0, high = their_count;
        while (low < high) { /* the first that costs no more than is wanted */
            int64_t middle = (low + high) / 2;
            if (d->costs[theirs[middle]] > wanted)
                low = middle + 1;
            else
                high = middle;
        }
        for (int64_t off = 0; off < d->window; off++) {
            if (low - 1 - off >= 0)
                try_swap(d, heavy, light, gap, mine, theirs[low - 1 - off], &best);
            if (low + off < their_count)
                try_swap(d, heavy, light, gap, mine, theirs[low + off], &best);
        }
    }
    if (best.mine < 0)
        return 0;
    int64_t moved = d->costs[best.mine] - (best.theirs < 0 ? 0 : d->costs[best.theirs]);
    d->loads[heavy] -= moved;
    d->loads[light] += moved;
    for (int64_t kind = 0; kind < d->kinds; kind++) {
        int64_t change = d->sizes[kind * d->count + best.mine] -
                         (best.theirs < 0 ? 0 : d->sizes[kind * d->count + best.theirs]);
        d->held[heavy * d->kinds + kind] -= change;
        d->held[light * d->kinds + kind] += change;
    }
    d->bucket_of[best.mine] = light;
    if (best.theirs >= 0)
        d->bucket_of[best.theirs] = heavy;
    return 1;
}

static int run_exchange(struct deal *d)
{
    if (open_deal(d))
        return -1;
    int64_t best = INT64_MAX, stuck = 0;
    for (int64_t round = 0; round < d->rounds_max; round++) {
        int64_t heavy_count = 0;
        for (int64_t bucket = 0; bucket < d->buckets; bucket++) {
            d->order[bucket] = (struct load){d->loads[bucket], bucket};
            heavy_count += d->loads[bucket] > d->target;
        }
        if (!heavy_count)
            break;
        sort_loads(d->order, d->order + d->buckets, d->buckets);
        int64_t worst = d->order[d->buckets - 1].value;
        stuck = worst < best ? 0 : stuck + 1;
        best = worst < best ? worst : best;
        if (stuck > d->stuck_max)
            break;
        heavy_count = heavy_count < d->buckets / 2 ? heavy_count : d->buckets / 2;
        list_members(d);
        int has_changed = 0;
        for (int64_t k = 0; k < heavy_count; k++) {
            int64_t heavy = d->order[d->buckets - 1 - k].number;
            int64_t light = d->order[(k + stuck) % (d->buckets - heavy_count)].number;
            has_changed |= exchange_pair(d, heavy, light);
        }
        if (!has_changed && stuck >= d->buckets - heavy_count)
            break;
    }
    close_deal(d);
    return 0;
}

PyObject *exchange(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[5];
    struct deal d;
    long long numbers[7];
    memset(&d, 0, sizeof d);
    if (!PyArg_ParseTuple(args, "OOOOOLLLLLLL", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &numbers[0], &numbers[1], &numbers[2], &numbers[3],
                          &numbers[4], &numbers[5], &numbers[6]))
        return NULL;
    struct buffers held = {.count = 0};
    if (take_deal(&d, &held, objects))
        return NULL;
    d.count_max = numbers[0];
    d.pinned = numbers[1];
    d.may_move = numbers[2];
    d.target = numbers[3];
    d.rounds_max = numbers[4];
    d.stuck_max = numbers[5];
    d.window = numbers[6];
    int is_sound = d.pinned >= 0;
    for (int64_t item = 0; is_sound && item < d.count; item++)
        is_sound = d.bucket_of[item] >= 0 && d.bucket_of[item] < d.buckets;
    if (!is_sound) {
        refuse(&held, "costs, sizes, caps and buckets do not fit each other");
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_exchange(&d);
    Py_END_ALLOW_THREADS
    return ended(&held, failed);
}
