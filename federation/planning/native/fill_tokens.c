/* Best fit by tokens: rows of equal free space form a heap, a bitmap finds the next space. */
#include "planning.h"

#include <stdlib.h>
#include <string.h>

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

PyObject *fill_tokens(PyObject *module, PyObject *args)
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
    return ended(&held, failed);
}
