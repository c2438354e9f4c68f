/* Best fit by tokens and units: an ordered set of keys for each, in blocks. */
#include "planning.h"

#include <stdlib.h>
#include <string.h>

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

PyObject *fill_units(PyObject *module, PyObject *args)
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
    return ended(&held, failed);
}
