/* Inner loops of planning: best fit of fragments into rows, deals of rows and items to buckets.
 *
 * Owns the loops and nothing else. The Python twins (fill_twin.py, deal_twin.py) give the same
 * results; what is decided and why is said there and in best_fit.py, balance.py, capped_deal.py.
 * All arithmetic is on int64 with stated ties. Callers keep sums within 62 bits.
 * Limited API (3.11), buffer protocol only: one binary for every later Python, no numpy headers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- buffers ---- */

#define BUFFERS_MAX 12

struct buffers {
    Py_buffer held[BUFFERS_MAX];
    int count;
};

static void release_buffers(struct buffers *b)
{
    while (b->count > 0)
        PyBuffer_Release(&b->held[--b->count]);
}

/* Takes a C-contiguous buffer of int64; `items` is what it must hold, or -1 to be told. */
static int64_t *take(struct buffers *b, PyObject *object, const char *name, int is_written,
                     int64_t *items)
{
    Py_buffer *buffer = &b->held[b->count];
    if (PyObject_GetBuffer(object, buffer, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    b->count++;
    if ((uintptr_t)buffer->buf % 8 || buffer->len % 8 ||
        (*items >= 0 && buffer->len / 8 != *items)) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes where %lld int64 are expected", name,
                     buffer->len, (long long)*items);
        return NULL;
    }
    *items = buffer->len / 8;
    static int64_t nothing;
    return buffer->buf ? buffer->buf : &nothing;
}

static int refuse(struct buffers *held, const char *text)
{
    release_buffers(held);
    PyErr_SetString(PyExc_ValueError, text);
    return -1;
}

/* ---- best fit by tokens: rows of equal free space form a heap, a bitmap finds the next space ---- */

#define LEVELS 6

struct spaces {
    int64_t most; /* largest free space */
    int64_t words[LEVELS];
    uint64_t *bits[LEVELS];
    uint64_t *all_bits;
    int levels;
    int32_t *heads;        /* heap of each space: row + 1, 0 where empty */
    int32_t *left, *right; /* of each row: row + 1, 0 where none */
};

static void close_spaces(struct spaces *s)
{
    free(s->all_bits);
    free(s->heads);
    free(s->left);
    free(s->right);
}

static int open_spaces(struct spaces *s, int64_t most, int64_t rows)
{
    int64_t total = 0, width = most + 1;
    memset(s, 0, sizeof *s);
    s->most = most;
    do {
        width = (width + 63) / 64;
        s->words[s->levels++] = width;
        total += width;
    } while (width > 1);
    s->all_bits = calloc((size_t)total, sizeof(uint64_t));
    s->heads = calloc((size_t)most + 1, sizeof(int32_t));
    s->left = calloc((size_t)rows + 1, sizeof(int32_t));
    s->right = calloc((size_t)rows + 1, sizeof(int32_t));
    if (!s->all_bits || !s->heads || !s->left || !s->right) {
        close_spaces(s);
        return -1;
    }
    uint64_t *at = s->all_bits;
    for (int level = 0; level < s->levels; level++) {
        s->bits[level] = at;
        at += s->words[level];
    }
    return 0;
}

static int lowest_bit(uint64_t word)
{
#if defined(__GNUC__)
    return __builtin_ctzll(word);
#else
    int bit = 0;
    while (!(word >> bit & 1))
        bit++;
    return bit;
#endif
}

/* The smallest space of at least `space` that a row has, or -1. */
static int64_t next_space(const struct spaces *s, int64_t space)
{
    int64_t place = space;
    for (int level = 0; level < s->levels; level++) {
        if (place >> 6 >= s->words[level])
            return -1;
        uint64_t word = s->bits[level][place >> 6] & (~(uint64_t)0 << (place & 63));
        if (word) {
            place = (place >> 6 << 6) + lowest_bit(word);
            while (level--)
                place = (place << 6) + lowest_bit(s->bits[level][place]);
            return place;
        }
        place = (place >> 6) + 1;
    }
    return -1;
}

/* Skew heap (Sleator and Tarjan 1986), lowest row first. */
static int32_t merge(struct spaces *s, int32_t a, int32_t b)
{
    int32_t root = 0, *link = &root;
    while (a && b) {
        if (a > b) {
            int32_t other = a;
            a = b;
            b = other;
        }
        /* The lower row is on top; its children change sides, the rest is merged to the left. */
        *link = a;
        int32_t right = s->right[a];
        s->right[a] = s->left[a];
        link = &s->left[a];
        a = right;
    }
    *link = a ? a : b;
    return root;
}

static void add_row(struct spaces *s, int64_t space, int32_t row)
{
    if (!s->heads[space]) {
        int64_t place = space;
        for (int level = 0; level < s->levels; level++, place >>= 6)
            s->bits[level][place >> 6] |= (uint64_t)1 << (place & 63);
    }
    s->left[row + 1] = s->right[row + 1] = 0;
    s->heads[space] = merge(s, s->heads[space], row + 1);
}

static int32_t take_row(struct spaces *s, int64_t space)
{
    int32_t top = s->heads[space];
    s->heads[space] = merge(s, s->left[top], s->right[top]);
    if (!s->heads[space]) {
        int64_t place = space;
        for (int level = 0; level < s->levels; level++, place >>= 6) {
            s->bits[level][place >> 6] &= ~((uint64_t)1 << (place & 63));
            if (s->bits[level][place >> 6])
                break;
        }
    }
    return top - 1;
}

static int run_fill_tokens(const int64_t *sizes, int64_t count, int64_t *space, int64_t *room,
                           int64_t rows, int64_t most, int64_t *found)
{
    struct spaces s;
    if (open_spaces(&s, most, rows))
        return -1;
    for (int64_t row = rows - 1; row >= 0; row--)
        if (room[row] > 0)
            add_row(&s, space[row], (int32_t)row);
    for (int64_t k = 0; k < count; k++) {
        int64_t place = next_space(&s, sizes[k]);
        if (place < 0) {
            found[k] = -1;
            continue;
        }
        int32_t row = take_row(&s, place);
        found[k] = row;
        space[row] = place - sizes[k];
        if (--room[row] > 0)
            add_row(&s, space[row], row);
    }
    close_spaces(&s);
    return 0;
}

static PyObject *fill_tokens(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[4];
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    struct buffers held = {.count = 0};
    int64_t count = -1, rows = -1;
    int64_t *sizes, *space, *room, *found;
    if (!(sizes = take(&held, objects[0], "sizes", 0, &count)) ||
        !(space = take(&held, objects[1], "space", 1, &rows)) ||
        !(room = take(&held, objects[2], "room", 1, &rows)) ||
        !(found = take(&held, objects[3], "found", 1, &count))) {
        release_buffers(&held);
        return NULL;
    }
    int64_t most = 0;
    int is_sound = rows < INT32_MAX;
    for (int64_t row = 0; row < rows; row++) {
        is_sound &= space[row] >= 0 && space[row] < INT32_MAX;
        most = space[row] > most ? space[row] : most;
    }
    for (int64_t k = 0; k < count; k++)
        is_sound &= sizes[k] >= 0;
    if (!is_sound) {
        refuse(&held, "sizes and spaces must be at least 0, spaces and rows below 2**31");
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_fill_tokens(sizes, count, space, room, rows, most, found);
    Py_END_ALLOW_THREADS
    release_buffers(&held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- best fit by tokens and units: an ordered set of keys for each, in blocks ---- */

#define BLOCK_KEYS 96
#define KINDS_MAX 8
#define ROW_BITS 32
#define ROW_MASK 0xFFFFFFFFLL

struct block {
    int count;
    int64_t most; /* no row of it has more free tokens: space only shrinks, so a bound stays one */
    int64_t keys[BLOCK_KEYS];
};

struct keyset {
    struct block **blocks; /* in order, none of them empty */
    int64_t count, room;
};

static void close_keyset(struct keyset *s)
{
    for (int64_t k = 0; k < s->count; k++)
        free(s->blocks[k]);
    free(s->blocks);
}

/* The first block whose last key is at least `key`. */
static int64_t find_block(const struct keyset *s, int64_t key)
{
    int64_t low = 0, high = s->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        const struct block *b = s->blocks[middle];
        if (b->keys[b->count - 1] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int find_key(const struct block *b, int64_t key)
{
    int low = 0, high = b->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (b->keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct block *insert_block(struct keyset *s, int64_t at)
{
    if (s->count == s->room) {
        int64_t room = s->room ? 2 * s->room : 16;
        struct block **wider = realloc(s->blocks, (size_t)room * sizeof *wider);
        if (!wider)
            return NULL;
        s->blocks = wider;
        s->room = room;
    }
    struct block *made = malloc(sizeof *made);
    if (!made)
        return NULL;
    made->count = 0;
    made->most = 0;
    memmove(s->blocks + at + 1, s->blocks + at, (size_t)(s->count - at) * sizeof *s->blocks);
    s->blocks[at] = made;
    s->count++;
    return made;
}

static int add_key(struct keyset *s, int64_t key, int64_t tokens)
{
    int64_t at = find_block(s, key);
    if (at == s->count && at > 0)
        at--;
    struct block *b = s->count ? s->blocks[at] : insert_block(s, 0);
    if (!b)
        return -1;
    if (b->count == BLOCK_KEYS) {
        struct block *upper = insert_block(s, at + 1);
        if (!upper)
            return -1;
        b->count = BLOCK_KEYS / 2;
        upper->count = BLOCK_KEYS - b->count;
        upper->most = b->most;
        memcpy(upper->keys, b->keys + b->count, (size_t)upper->count * sizeof(int64_t));
        if (key > b->keys[b->count - 1])
            b = upper;
    }
    int place = find_key(b, key);
    memmove(b->keys + place + 1, b->keys + place, (size_t)(b->count - place) * sizeof(int64_t));
    b->keys[place] = key;
    b->count++;
    if (b->most < tokens)
        b->most = tokens;
    return 0;
}

static void drop_key(struct keyset *s, int64_t key)
{
    int64_t at = find_block(s, key);
    struct block *b = s->blocks[at];
    int place = find_key(b, key);
    b->count--;
    memmove(b->keys + place, b->keys + place + 1, (size_t)(b->count - place) * sizeof(int64_t));
    if (!b->count) {
        free(b);
        s->count--;
        memmove(s->blocks + at, s->blocks + at + 1,
                (size_t)(s->count - at) * sizeof *s->blocks);
    }
}

struct unit_rows {
    int64_t kinds, rows;
    int64_t *space; /* (kinds, rows) */
    int64_t *room;
    struct keyset sets[KINDS_MAX];
};

/* The first row by free space of kind `lead` that holds all of `taken`, or -1. */
static int64_t first_that_holds(const struct unit_rows *u, const int64_t *taken, int64_t lead)
{
    const struct keyset *s = &u->sets[lead];
    int64_t key = taken[lead] << ROW_BITS;
    int64_t at = find_block(s, key);
    int place = at < s->count ? find_key(s->blocks[at], key) : 0;
    for (; at < s->count; at++, place = 0) {
        struct block *b = s->blocks[at];
        if (b->most < taken[0])
            continue;
        int64_t most = place ? b->most : 0;
        for (; place < b->count; place++) {
            int64_t row = b->keys[place] & ROW_MASK;
            int holds = 1;
            for (int64_t kind = 0; kind < u->kinds && holds; kind++)
                holds = u->space[kind * u->rows + row] >= taken[kind];
            if (holds)
                return row;
            most = u->space[row] > most ? u->space[row] : most;
        }
        b->most = most;
    }
    return -1;
}

static int run_fill_units(struct unit_rows *u, const int64_t *taken, const int64_t *leads,
                          int64_t count, int64_t *found)
{
    for (int64_t kind = 0; kind < u->kinds; kind++)
        for (int64_t row = 0; row < u->rows; row++)
            if (u->room[row] > 0 &&
                add_key(&u->sets[kind], u->space[kind * u->rows + row] << ROW_BITS | row,
                        u->space[row]))
                return -1;
    for (int64_t k = 0; k < count; k++) {
        const int64_t *mine = taken + k * u->kinds;
        int64_t row = found[k] = first_that_holds(u, mine, leads[k]);
        if (row < 0)
            continue;
        int is_closed = !--u->room[row];
        for (int64_t kind = 0; kind < u->kinds; kind++) {
            if (!mine[kind] && !is_closed)
                continue;
            int64_t *space = &u->space[kind * u->rows + row];
            drop_key(&u->sets[kind], *space << ROW_BITS | row);
            *space -= mine[kind]; /* tokens, kind 0, first: the bounds of the others are of these */
            if (!is_closed && add_key(&u->sets[kind], *space << ROW_BITS | row, u->space[row]))
                return -1;
        }
    }
    return 0;
}

static PyObject *fill_units(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[5];
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4]))
        return NULL;
    struct buffers held = {.count = 0};
    struct unit_rows u;
    memset(&u, 0, sizeof u);
    int64_t taken_items = -1, count = -1, space_items = -1;
    int64_t *taken, *leads, *found;
    u.rows = -1;
    if (!(taken = take(&held, objects[0], "taken", 0, &taken_items)) ||
        !(leads = take(&held, objects[1], "leads", 0, &count)) ||
        !(u.space = take(&held, objects[2], "space", 1, &space_items)) ||
        !(u.room = take(&held, objects[3], "room", 1, &u.rows)) ||
        !(found = take(&held, objects[4], "found", 1, &count))) {
        release_buffers(&held);
        return NULL;
    }
    u.kinds = u.rows ? space_items / u.rows : 1;
    int is_sound = u.kinds >= 1 && u.kinds <= KINDS_MAX && space_items == u.kinds * u.rows &&
                   taken_items == count * u.kinds && u.rows < INT32_MAX;
    for (int64_t k = 0; is_sound && k < count; k++)
        is_sound = leads[k] >= 0 && leads[k] < u.kinds;
    for (int64_t k = 0; is_sound && k < taken_items; k++)
        is_sound = taken[k] >= 0 && taken[k] < INT32_MAX;
    for (int64_t k = 0; is_sound && k < space_items; k++)
        is_sound = u.space[k] >= 0 && u.space[k] < INT32_MAX;
    if (!is_sound) {
        refuse(&held, "taken, leads and space do not fit each other, or are beyond 2**31");
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_fill_units(&u, taken, leads, count, found);
    Py_END_ALLOW_THREADS
    for (int64_t kind = 0; kind < u.kinds; kind++)
        close_keyset(&u.sets[kind]);
    release_buffers(&held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- deals ---- */

struct load {
    int64_t value, number;
};

static int by_load(const void *a, const void *b)
{
    const struct load *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

/* Stable merge sort by `value`, rising; `number`s rise within equal ones if they did before. */
static void sort_loads(struct load *at, struct load *spare, int64_t count)
{
    for (int64_t low = 0; low < count; low += 8)
        for (int64_t k = low + 1; k < count && k < low + 8; k++) {
            struct load moved = at[k];
            int64_t hole = k;
            for (; hole > low && by_load(&moved, &at[hole - 1]) < 0; hole--)
                at[hole] = at[hole - 1];
            at[hole] = moved;
        }
    struct load *from = at, *to = spare;
    for (int64_t width = 8; width < count; width *= 2) {
        for (int64_t low = 0; low < count; low += 2 * width) {
            int64_t middle = low + width < count ? low + width : count;
            int64_t high = low + 2 * width < count ? low + 2 * width : count;
            int64_t a = low, b = middle, out = low;
            if (middle == high || by_load(&from[middle - 1], &from[middle]) <= 0) {
                memcpy(to + low, from + low, (size_t)(high - low) * sizeof *to);
                continue;
            }
            while (a < middle && b < high)
                to[out++] = by_load(&from[b], &from[a]) < 0 ? from[b++] : from[a++];
            memcpy(to + out, from + a, (size_t)(middle - a) * sizeof *to);
            out += middle - a;
            memcpy(to + out, from + b, (size_t)(high - b) * sizeof *to);
        }
        struct load *other = from;
        from = to;
        to = other;
    }
    if (from != at)
        memcpy(at, from, (size_t)count * sizeof *at);
}

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

static PyObject *deal_rounds(PyObject *module, PyObject *args)
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
    release_buffers(&held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

struct deal {
    int64_t count, buckets, kinds;
    const int64_t *costs, *sizes, *caps; /* sizes (kinds, count); costs fall */
    int64_t count_max, pinned, may_move, target, rounds_max, stuck_max, window;
    int64_t *bucket_of, *loads;
    int64_t *held;     /* (buckets, kinds) */
    int64_t *counts;   /* of each bucket, pinned ones left out */
    int64_t *starts;   /* (buckets + 1) */
    int64_t *members;  /* items by bucket, rising */
    struct load *order;
};

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

static PyObject *exchange(PyObject *module, PyObject *args)
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
    int64_t size_items = -1;
    d.count = d.kinds = d.buckets = -1;
    if (!(d.costs = take(&held, objects[0], "costs", 0, &d.count)) ||
        !(d.sizes = take(&held, objects[1], "sizes", 0, &size_items)) ||
        !(d.caps = take(&held, objects[2], "caps", 0, &d.kinds)) ||
        !(d.bucket_of = take(&held, objects[3], "bucket_of", 1, &d.count)) ||
        !(d.loads = take(&held, objects[4], "loads", 1, &d.buckets))) {
        release_buffers(&held);
        return NULL;
    }
    d.count_max = numbers[0];
    d.pinned = numbers[1];
    d.may_move = numbers[2];
    d.target = numbers[3];
    d.rounds_max = numbers[4];
    d.stuck_max = numbers[5];
    d.window = numbers[6];
    int is_sound = d.buckets >= 1 && size_items == d.kinds * d.count && d.pinned >= 0;
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
    release_buffers(&held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- the lightest bucket that has room ---- */

static void sink(struct load *heap, int64_t count, int64_t at)
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

static void lift(struct load *heap, int64_t at)
{
    struct load moved = heap[at];
    while (at > 0 && by_load(&moved, &heap[(at - 1) / 2]) < 0) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = moved;
}

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

static PyObject *deal_lightest(PyObject *module, PyObject *args)
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
    int64_t size_items = -1;
    d.count = d.kinds = d.buckets = -1;
    if (!(d.costs = take(&held, objects[0], "costs", 0, &d.count)) ||
        !(d.sizes = take(&held, objects[1], "sizes", 0, &size_items)) ||
        !(d.caps = take(&held, objects[2], "caps", 0, &d.kinds)) ||
        !(d.bucket_of = take(&held, objects[3], "bucket_of", 1, &d.count)) ||
        !(d.loads = take(&held, objects[4], "loads", 1, &d.buckets))) {
        release_buffers(&held);
        return NULL;
    }
    d.count_max = count_max;
    if (d.buckets < 1 || size_items != d.kinds * d.count) {
        refuse(&held, "costs, sizes, caps and buckets do not fit each other");
        return NULL;
    }
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = run_lightest(&d);
    Py_END_ALLOW_THREADS
    release_buffers(&held);
    if (result < 0)
        return PyErr_NoMemory();
    return PyBool_FromLong(!result);
}

/* ---- largest differencing with equal counts ---- */

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

static PyObject *deal_differences(PyObject *module, PyObject *args)
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
    release_buffers(&held);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- one forward, one backward ---- */

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

static PyObject *makespans(PyObject *module, PyObject *args)
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

static PyMethodDef methods[] = {
    {"fill_tokens", fill_tokens, METH_VARARGS,
     "fill_tokens(sizes, space, room, found): best fit by free tokens; space and room are used up"},
    {"fill_units", fill_units, METH_VARARGS,
     "fill_units(taken, leads, space, room, found): best fit by the free space of each one's lead"},
    {"deal_rounds", deal_rounds, METH_VARARGS,
     "deal_rounds(costs, loads, head_rounds, head_weight, found): equally many to each bucket"},
    {"deal_lightest", deal_lightest, METH_VARARGS,
     "deal_lightest(costs, sizes, caps, count_max, bucket_of, loads) -> True where all find room"},
    {"deal_differences", deal_differences, METH_VARARGS,
     "deal_differences(costs, buckets, found): Karmarkar-Karp, equally many to each bucket"},
    {"exchange", exchange, METH_VARARGS,
     "exchange(costs, sizes, caps, bucket_of, loads, count_max, pinned, may_move, target, "
     "rounds_max, stuck_max, window): lower the heaviest bucket by swaps and moves"},
    {"makespans", makespans, METH_VARARGS,
     "makespans(costs, stages, found): when each pipeline ends, one forward, one backward"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_doc = "Inner loops of planning, see the twins.",
    .m_size = 0,           .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
