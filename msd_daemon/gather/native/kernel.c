/* Gather of one microbatch: segments of chunks in the pool -> rows of a slot, in one pass; and the
 * deal of such rows to context-parallel ranks, segment by segment.
 *
 * Owns the inner loops and nothing else. The numpy twin (numpy_twin.py) writes the same bytes and
 * refuses the same input; the chunk layout is that of msd_daemon/shm/chunk_layout.py.
 *
 * The pool is written by other processes, so nothing in it is believed: every number is loaded
 * once into a local, checked, and only the local is used. Runs without the GIL.
 * Limited API (3.11), buffer protocol only: one binary for every later Python, no numpy headers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "chunks are little-endian and this kernel reads them in place; use the numpy twin"
#endif

/* Wider vectors where the machine has them, chosen once by the loader (glibc only): about a tenth
 * faster. Non-temporal stores are not used: a slot is read soon, and plain ones reach memcpy's rate. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif

#define CHUNK_MAGIC 0x4B44534Du
#define CHUNK_VERSION 1
#define CHUNK_ALIGN 64
#define HEADER_BYTES 64
#define FLAG_HAS_INDEX 4u

enum { LABELS_ALIGNED = 1, DOCUMENTS_JOINED = 2 };

enum fault_code {
    FAULT_NONE = 0,
    FAULT_CHUNK_OFFSET,
    FAULT_CHUNK_HEADER,
    FAULT_CHUNK_SIZE,
    FAULT_SAMPLE,
    FAULT_OFFSETS,
    FAULT_SPAN,
    FAULT_PLACE,
    FAULT_ORDER,
    FAULT_BOUNDARIES,
    FAULT_MULTIPLE,
    FAULT_SOURCE,
};

struct fault {
    enum fault_code code;
    int64_t segment, seen, limit;
};

struct gather {
    const uint8_t *pool;
    int64_t pool_bytes;
    int64_t segments;
    const int64_t *chunk_offset;
    const int32_t *sample, *sample_offset, *length, *row, *column, *source;
    int64_t rows, row_tokens;
    uint8_t *tokens, *labels;
    int token_out_bytes, label_out_bytes;
    int32_t *position_ids, *boundaries, *padded, *segment_source;
    float *loss_weights;
    const float *source_weights; /* NULL: every label weighs 1 */
    int64_t sources;
    int64_t boundaries_max;
    int64_t pad_id, ignore_label;
    int64_t multiple;
    int is_aligned, is_joined;
    int64_t true_end; /* sum of the lengths so far, padding inside segments left out */
    /* results */
    int64_t boundary_count, longest, valid_tokens;
};

/* ---- inner loops: written plainly so that the compiler vectorises them ---- */

#define DEFINE_WIDEN(name, in_type, out_type)                                                   \
    WIDE static void name(out_type *restrict out, const in_type *restrict in, int64_t count)    \
    {                                                                                           \
        for (int64_t k = 0; k < count; k++)                                                     \
            out[k] = (out_type)in[k];                                                           \
    }
DEFINE_WIDEN(widen_16_32, uint16_t, int32_t)
DEFINE_WIDEN(widen_16_64, uint16_t, int64_t)
DEFINE_WIDEN(widen_32_64, int32_t, int64_t)

WIDE static void fill_32(int32_t *restrict out, int32_t value, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        out[k] = value;
}

WIDE static void fill_64(int64_t *restrict out, int64_t value, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        out[k] = value;
}

WIDE static void fill_float(float *restrict out, float value, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        out[k] = value;
}

WIDE static void count_up(int32_t *restrict out, int32_t count)
{
    for (int32_t k = 0; k < count; k++)
        out[k] = k;
}

static void put_tokens(uint8_t *out, int out_bytes, int64_t at, const uint8_t *in, int in_bytes,
                       int64_t count)
{
    if (count <= 0)
        return;
    if (out_bytes == 4) {
        int32_t *place = (int32_t *)out + at;
        if (in_bytes == 4)
            memcpy(place, in, (size_t)count * 4);
        else
            widen_16_32(place, (const uint16_t *)in, count);
    } else {
        int64_t *place = (int64_t *)out + at;
        if (in_bytes == 4)
            widen_32_64(place, (const int32_t *)in, count);
        else
            widen_16_64(place, (const uint16_t *)in, count);
    }
}

static void put_value(uint8_t *out, int out_bytes, int64_t at, int64_t value, int64_t count)
{
    if (out_bytes == 4)
        fill_32((int32_t *)out + at, (int32_t)value, count);
    else
        fill_64((int64_t *)out + at, value, count);
}

/* ---- resolving a segment: pool -> chunk header -> offsets -> payload ---- */

static int64_t load_i64(const uint8_t *at) { return *(const volatile int64_t *)at; }
static int32_t load_i32(const uint8_t *at) { return *(const volatile int32_t *)at; }
static uint32_t load_u32(const uint8_t *at) { return *(const volatile uint32_t *)at; }
static uint16_t load_u16(const uint8_t *at) { return *(const volatile uint16_t *)at; }

static int refuse(struct fault *fault, enum fault_code code, int64_t segment, int64_t seen,
                  int64_t limit)
{
    fault->code = code;
    fault->segment = segment;
    fault->seen = seen;
    fault->limit = limit;
    return -1;
}

/* What a chunk's header says, each number loaded once. */
struct header {
    uint32_t magic, flags;
    uint16_t version;
    int width;
    int32_t source;
    int64_t records, payload_offset, payload_bytes;
};

static struct header load_header(const uint8_t *chunk)
{
    return (struct header){
        .magic = load_u32(chunk),
        .version = load_u16(chunk + 4),
        .width = load_u16(chunk + 6),
        .source = load_i32(chunk + 8),
        .records = load_i32(chunk + 12),
        .flags = load_u32(chunk + 28),
        .payload_offset = load_u32(chunk + 32),
        .payload_bytes = load_i64(chunk + 40),
    };
}

static int is_chunk(const struct header *h)
{
    return h->magic == CHUNK_MAGIC && h->version == CHUNK_VERSION &&
           (h->width == 2 || h->width == 4);
}

/* Where the columns of a chunk's records end; there are none below 0. */
static int64_t columns_end(const struct header *h)
{
    int64_t end = HEADER_BYTES + 8 * (h->records + 1) + (h->records + 7) / 8 * 8;
    return h->flags & FLAG_HAS_INDEX ? end + (4 * h->records + 7) / 8 * 8 : end;
}

/* Finds the tokens of segment i. The order of checks is the twin's. */
static int resolve(const struct gather *g, int64_t i, const uint8_t **tokens, int *token_bytes,
                   struct fault *fault)
{
    int64_t at = g->chunk_offset[i];
    if (at < 0 || at % CHUNK_ALIGN || at > g->pool_bytes - HEADER_BYTES)
        return refuse(fault, FAULT_CHUNK_OFFSET, i, at, g->pool_bytes);
    const uint8_t *chunk = g->pool + at;
    int64_t room = g->pool_bytes - at;
    struct header h = load_header(chunk);
    int width = h.width;
    int64_t records = h.records, payload_offset = h.payload_offset, payload_bytes = h.payload_bytes;
    if (!is_chunk(&h))
        return refuse(fault, FAULT_CHUNK_HEADER, i, at, h.magic);
    if (records < 0)
        return refuse(fault, FAULT_CHUNK_SIZE, i, records, room);
    if (payload_offset < columns_end(&h) || payload_offset % CHUNK_ALIGN || payload_offset > room ||
        payload_bytes < 0 || payload_bytes > room - payload_offset)
        return refuse(fault, FAULT_CHUNK_SIZE, i, payload_bytes, room);
    int64_t sample = g->sample[i];
    if (sample < 0 || sample >= records)
        return refuse(fault, FAULT_SAMPLE, i, sample, records);
    int64_t start = load_i64(chunk + HEADER_BYTES + 8 * sample);
    int64_t end = load_i64(chunk + HEADER_BYTES + 8 * sample + 8);
    if (start < 0 || end < start || end > payload_bytes / width)
        return refuse(fault, FAULT_OFFSETS, i, end, payload_bytes / width);
    int64_t offset = g->sample_offset[i], length = g->length[i];
    if (offset < 0 || length <= 0 || length > end - start - offset)
        return refuse(fault, FAULT_SPAN, i, offset + length, end - start);
    *tokens = chunk + payload_offset + (start + offset) * width;
    *token_bytes = width;
    return 0;
}

/* The next segments are known, their cache lines are not yet here: ask for them early. */
static void prefetch(const struct gather *g, int64_t i)
{
#if defined(__GNUC__)
    if (i >= g->segments)
        return;
    int64_t at = g->chunk_offset[i];
    if (at < 0 || at >= g->pool_bytes)
        return;
    int64_t entry = at + HEADER_BYTES + 8 * (int64_t)g->sample[i];
    if (entry < 0 || entry >= g->pool_bytes)
        return;
    __builtin_prefetch(g->pool + at);
    __builtin_prefetch(g->pool + entry);
#else
    (void)g, (void)i;
#endif
}

/* ---- writing ---- */

/* A segment of `length` tokens in `extent` places ends at place `end`. */
static int close_boundary(struct gather *g, int64_t end, int32_t source, int64_t length,
                          int64_t extent, int64_t segment, struct fault *fault)
{
    if (g->boundary_count >= g->boundaries_max)
        return refuse(fault, FAULT_BOUNDARIES, segment, g->boundary_count + 1, g->boundaries_max);
    if (g->segment_source)
        g->segment_source[g->boundary_count] = source;
    g->boundary_count++;
    g->true_end += length;
    if (g->boundaries)
        g->boundaries[g->boundary_count] = (int32_t)g->true_end;
    if (g->padded)
        g->padded[g->boundary_count] = (int32_t)end;
    if (extent > g->longest)
        g->longest = extent;
    return 0;
}

/* Token, label and weight of places that hold nothing. */
static void put_nothing(struct gather *g, int64_t from, int64_t count)
{
    if (g->tokens)
        put_value(g->tokens, g->token_out_bytes, from, g->pad_id, count);
    if (g->labels)
        put_value(g->labels, g->label_out_bytes, from, g->ignore_label, count);
    if (g->loss_weights)
        fill_float(g->loss_weights + from, 0, count);
}

/* Padding from `from` to `to` (flattened places), cut at row ends: one segment per row. */
static int put_padding(struct gather *g, int64_t from, int64_t to, int64_t segment,
                       struct fault *fault)
{
    while (from < to) {
        int64_t row_end = (from / g->row_tokens + 1) * g->row_tokens;
        int64_t end = row_end < to ? row_end : to;
        int64_t count = end - from;
        put_nothing(g, from, count);
        if (g->position_ids)
            count_up(g->position_ids + from, (int32_t)count);
        if (close_boundary(g, end, -1, count, count, segment, fault))
            return -1;
        from = end;
    }
    return 0;
}

/* Weights beside the labels that `put_labels` writes. */
static void put_weights(struct gather *g, int64_t at, int64_t length, float weight, float before,
                        int is_continued)
{
    float *out = g->loss_weights;
    if (g->is_aligned) {
        out[at] = is_continued ? weight : 0;
        fill_float(out + at + 1, weight, length - 1);
        return;
    }
    if (is_continued)
        out[at - 1] = before;
    fill_float(out + at, weight, length - 1);
    out[at + length - 1] = 0;
}

/* Labels of a segment at `at`. `is_continued`: joined, and the row's previous place is filled. */
static void put_labels(struct gather *g, int64_t at, const uint8_t *tokens, int width,
                       int64_t length, int is_continued)
{
    if (g->is_aligned) {
        int skipped = !is_continued;
        if (skipped)
            put_value(g->labels, g->label_out_bytes, at, g->ignore_label, 1);
        put_tokens(g->labels, g->label_out_bytes, at + skipped, tokens + skipped * width, width,
                   length - skipped);
        return;
    }
    if (is_continued)
        put_tokens(g->labels, g->label_out_bytes, at - 1, tokens, width, 1);
    put_tokens(g->labels, g->label_out_bytes, at, tokens + width, width, length - 1);
    put_value(g->labels, g->label_out_bytes, at + length - 1, g->ignore_label, 1);
}

#define PREFETCH_AHEAD 6

static int run(struct gather *g, struct fault *fault)
{
    int64_t cursor = 0; /* flattened place that is written next */
    int is_filled = 0;  /* the place before the cursor holds a token, not padding */
    float weight = 1;   /* of the labels of the segment at hand */
    if (g->boundaries)
        g->boundaries[0] = 0;
    if (g->padded)
        g->padded[0] = 0;
    for (int64_t i = 0; i < PREFETCH_AHEAD; i++)
        prefetch(g, i);
    for (int64_t i = 0; i < g->segments; i++) {
        const uint8_t *tokens;
        int width;
        prefetch(g, i + PREFETCH_AHEAD);
        if (resolve(g, i, &tokens, &width, fault))
            return -1;
        int64_t row = g->row[i], column = g->column[i], length = g->length[i];
        int64_t extent = length;
        if (g->multiple > 1) {
            extent = (length + g->multiple - 1) / g->multiple * g->multiple;
            if (column % g->multiple)
                return refuse(fault, FAULT_MULTIPLE, i, column, g->multiple);
        }
        if (row < 0 || row >= g->rows || column < 0 || extent > g->row_tokens - column)
            return refuse(fault, FAULT_PLACE, i, row, column);
        int64_t at = row * g->row_tokens + column;
        if (at < cursor)
            return refuse(fault, FAULT_ORDER, i, at, cursor);
        if (at > cursor) {
            if (put_padding(g, cursor, at, i, fault))
                return -1;
            is_filled = 0;
        }
        float before = weight; /* that of the segment before this one */
        if (g->source_weights) {
            int64_t source = g->source[i];
            if (source < 0 || source >= g->sources)
                return refuse(fault, FAULT_SOURCE, i, source, g->sources);
            weight = g->source_weights[source];
        }
        int is_continued = g->is_joined && is_filled && column > 0;
        if (g->tokens)
            put_tokens(g->tokens, g->token_out_bytes, at, tokens, width, length);
        if (g->labels)
            put_labels(g, at, tokens, width, length, is_continued);
        if (g->loss_weights)
            put_weights(g, at, length, weight, before, is_continued);
        if (extent > length)
            put_nothing(g, at + length, extent - length);
        if (g->position_ids)
            count_up(g->position_ids + at, (int32_t)extent);
        /* The label of a join lies in the segment before (shifted) or in this one (aligned). */
        if (weight > 0)
            g->valid_tokens += length - 1;
        if (is_continued && (g->is_aligned ? weight : before) > 0)
            g->valid_tokens++;
        cursor = at + extent;
        is_filled = extent == length;
        if (close_boundary(g, cursor, g->source[i], length, extent, i, fault))
            return -1;
    }
    return put_padding(g, cursor, g->rows * g->row_tokens, g->segments, fault);
}

/* ---- Python's side ---- */

static PyObject *raise_fault(const struct fault *f)
{
    static const char *const texts[] = {
        [FAULT_CHUNK_OFFSET] = "chunk offset %lld is outside the pool of %lld bytes or not "
                               "64-byte aligned",
        [FAULT_CHUNK_HEADER] = "no chunk header at pool offset %lld (magic %lld)",
        [FAULT_CHUNK_SIZE] = "chunk header states sizes (%lld) that do not fit the %lld bytes "
                             "behind it",
        [FAULT_SAMPLE] = "sample %lld of a chunk of %lld records",
        [FAULT_OFFSETS] = "chunk offsets end at token %lld of a payload of %lld",
        [FAULT_SPAN] = "span ends at token %lld of a record of %lld, or is empty",
        [FAULT_PLACE] = "place (row %lld, column %lld) is outside the microbatch",
        [FAULT_ORDER] = "place %lld overlaps or precedes the segment before it, which ends at %lld",
        [FAULT_BOUNDARIES] = "boundary %lld where the slot has room for %lld segments",
        [FAULT_MULTIPLE] = "column %lld is no multiple of segment_multiple %lld",
        [FAULT_SOURCE] = "source %lld where %lld sources have a loss weight",
    };
    char text[192];
    PyOS_snprintf(text, sizeof text, texts[f->code], (long long)f->seen, (long long)f->limit);
    PyErr_Format(PyExc_ValueError, "segment %lld: %s", (long long)f->segment, text);
    return NULL;
}

#define BUFFERS_MAX 16

struct buffers {
    Py_buffer held[BUFFERS_MAX];
    int count;
};

static void release_buffers(struct buffers *b)
{
    while (b->count > 0)
        PyBuffer_Release(&b->held[--b->count]);
}

/* Takes a C-contiguous buffer; NULL with *ok = 1 where `object` is None. */
static void *take(struct buffers *b, PyObject *object, const char *name, int is_written,
                  Py_ssize_t item_bytes, Py_ssize_t *nbytes, int *ok)
{
    *nbytes = 0;
    if (object == Py_None)
        return NULL;
    Py_buffer *buffer = &b->held[b->count];
    if (PyObject_GetBuffer(object, buffer, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
        *ok = 0;
        return NULL;
    }
    b->count++;
    *nbytes = buffer->len;
    if ((uintptr_t)buffer->buf % (uintptr_t)item_bytes || buffer->len % item_bytes) {
        PyErr_Format(PyExc_ValueError, "%s: not aligned to its items of %zd bytes", name,
                     item_bytes);
        *ok = 0;
    }
    return buffer->buf;
}

static const void *take_column(struct buffers *b, PyObject *object, const char *name,
                               Py_ssize_t item_bytes, Py_ssize_t segments, int *ok)
{
    Py_ssize_t nbytes;
    if (!*ok)
        return NULL;
    const void *data = take(b, object, name, 0, item_bytes, &nbytes, ok);
    if (*ok && nbytes != segments * item_bytes) {
        PyErr_Format(PyExc_ValueError, "column %s has %zd bytes, %zd segments need %zd", name,
                     nbytes, segments, segments * item_bytes);
        *ok = 0;
    }
    return data;
}

/* An output of rows * row_tokens items of 4 or 8 bytes. */
static void *take_output(struct buffers *b, PyObject *object, const char *name, int64_t places,
                         int *item_bytes, int *ok)
{
    Py_ssize_t nbytes;
    *item_bytes = 4;
    if (!*ok)
        return NULL;
    void *data = take(b, object, name, 1, 4, &nbytes, ok);
    if (!*ok || !data)
        return data;
    if (nbytes == places * 8 && (uintptr_t)data % 8 == 0)
        *item_bytes = 8;
    else if (nbytes != places * 4) {
        PyErr_Format(PyExc_ValueError, "output %s has %zd bytes, expected 4 or 8 for each of %lld",
                     name, nbytes, (long long)places);
        *ok = 0;
    }
    return data;
}

/* An int32 output with an entry for every segment, and `lead` more before them. */
static int32_t *take_ragged(struct gather *g, struct buffers *b, PyObject *object, const char *name,
                            Py_ssize_t lead, int *ok)
{
    Py_ssize_t nbytes;
    if (!*ok)
        return NULL;
    int32_t *data = take(b, object, name, 1, 4, &nbytes, ok);
    if (*ok && data && nbytes / 4 - lead < g->boundaries_max)
        g->boundaries_max = nbytes / 4 - lead;
    return data;
}

static int take_all(struct gather *g, struct buffers *b, PyObject *const *columns,
                    PyObject *const *outputs)
{
    Py_ssize_t nbytes;
    int ok = 1, position_bytes;
    g->pool = take(b, columns[0], "pool", 0, 1, &nbytes, &ok);
    g->pool_bytes = nbytes;
    if (ok && (!g->pool || (uintptr_t)g->pool % 8)) {
        PyErr_SetString(PyExc_ValueError, "pool: not aligned to 8 bytes");
        ok = 0;
    }
    if (ok) {
        g->chunk_offset = take(b, columns[1], "chunk_offset", 0, 8, &nbytes, &ok);
        g->segments = nbytes / 8;
    }
    static const char *const names[] = {"sample", "sample_offset", "length",
                                        "row",    "column",        "source"};
    const int32_t **places[] = {&g->sample, &g->sample_offset, &g->length,
                                &g->row,    &g->column,        &g->source};
    for (int k = 0; k < 6; k++)
        *places[k] = take_column(b, columns[2 + k], names[k], 4, g->segments, &ok);
    int64_t count = g->rows * g->row_tokens;
    g->tokens = take_output(b, outputs[0], "tokens", count, &g->token_out_bytes, &ok);
    g->labels = take_output(b, outputs[1], "labels", count, &g->label_out_bytes, &ok);
    g->position_ids = take_output(b, outputs[2], "position_ids", count, &position_bytes, &ok);
    if (ok && position_bytes != 4) {
        PyErr_SetString(PyExc_ValueError, "output position_ids must be int32");
        ok = 0;
    }
    int weight_bytes;
    g->loss_weights = take_output(b, outputs[3], "loss_weights", count, &weight_bytes, &ok);
    if (ok && weight_bytes != 4) {
        PyErr_SetString(PyExc_ValueError, "output loss_weights must be float32");
        ok = 0;
    }
    g->boundaries_max = INT64_MAX;
    g->boundaries = take_ragged(g, b, outputs[4], "cu_seqlens", 1, &ok);
    g->padded = take_ragged(g, b, outputs[5], "cu_seqlens_padded", 1, &ok);
    g->segment_source = take_ragged(g, b, outputs[6], "segment_source", 0, &ok);
    if (ok && (g->source_weights = take(b, outputs[7], "source_weights", 0, 4, &nbytes, &ok)))
        g->sources = nbytes / 4;
    return ok ? 0 : -1;
}

static PyObject *gather(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *columns[8], *outputs[8];
    long long rows, row_tokens, pad_id, ignore_label, multiple;
    int flags;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLLOOOOOOOOLLLi", &columns[0], &columns[1], &columns[2],
                          &columns[3], &columns[4], &columns[5], &columns[6], &columns[7], &rows,
                          &row_tokens, &outputs[0], &outputs[1], &outputs[2], &outputs[3],
                          &outputs[4], &outputs[5], &outputs[6], &outputs[7], &pad_id,
                          &ignore_label, &multiple, &flags))
        return NULL;
    if (rows < 1 || row_tokens < 1 || rows > INT32_MAX / row_tokens) {
        PyErr_Format(PyExc_ValueError, "shape (%lld, %lld) is empty or beyond int32", rows,
                     row_tokens);
        return NULL;
    }
    if (multiple < 1 || row_tokens % multiple) {
        PyErr_Format(PyExc_ValueError, "segment_multiple %lld does not divide row_tokens %lld",
                     multiple, row_tokens);
        return NULL;
    }
    struct gather g = {.rows = rows,
                       .row_tokens = row_tokens,
                       .pad_id = pad_id,
                       .ignore_label = ignore_label,
                       .multiple = multiple,
                       .is_aligned = !!(flags & LABELS_ALIGNED),
                       .is_joined = !!(flags & DOCUMENTS_JOINED)};
    struct buffers held = {.count = 0};
    struct fault fault = {.code = FAULT_NONE};
    if (take_all(&g, &held, columns, outputs)) {
        release_buffers(&held);
        return NULL;
    }
    int failed;
    if (g.boundaries_max < 0) /* an empty cu_seqlens has no room even for its 0 */
        failed = refuse(&fault, FAULT_BOUNDARIES, 0, 0, g.boundaries_max);
    else {
        Py_BEGIN_ALLOW_THREADS
        failed = run(&g, &fault);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&held);
    if (failed)
        return raise_fault(&fault);
    return Py_BuildValue("LLL", (long long)g.boundary_count, (long long)g.longest,
                         (long long)g.valid_tokens);
}

/* Both buffers hold bounds[last] items; every extent was checked. */
static void deal(const uint8_t *source, uint8_t *target, const int32_t *bounds, int64_t segments,
                 int64_t cp_count, int64_t item_bytes)
{
    int64_t share = bounds[segments] / cp_count;
    for (int64_t rank = 0; rank < cp_count; rank++) {
        int64_t mirror = 2 * cp_count - 1 - rank;
        for (int64_t i = 0; i < segments; i++) {
            int64_t first = bounds[i], chunk = (bounds[i + 1] - first) / (2 * cp_count);
            uint8_t *out = target + (rank * share + first / cp_count) * item_bytes;
            size_t size = (size_t)(chunk * item_bytes);
            memcpy(out, source + (first + rank * chunk) * item_bytes, size);
            memcpy(out + size, source + (first + mirror * chunk) * item_bytes, size);
        }
    }
}

static PyObject *deal_documents(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[3];
    long long cp_count, item_bytes;
    if (!PyArg_ParseTuple(args, "OOOLL", &objects[0], &objects[1], &objects[2], &cp_count,
                          &item_bytes))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t source_bytes, target_bytes = 0, bounds_bytes = 0;
    int ok = 1;
    const uint8_t *source = take(&held, objects[0], "source", 0, 1, &source_bytes, &ok);
    uint8_t *target = ok ? take(&held, objects[1], "target", 1, 1, &target_bytes, &ok) : NULL;
    const int32_t *bounds = ok ? take(&held, objects[2], "bounds", 0, 4, &bounds_bytes, &ok) : NULL;
    int64_t segments = 0, total = 0;
    if (ok) {
        ok = source && target && bounds && cp_count > 0 && cp_count <= INT32_MAX && item_bytes > 0 &&
             item_bytes <= 8 && bounds_bytes >= 8;
        segments = ok ? bounds_bytes / 4 - 1 : 0;
        if (ok)
            ok = bounds[0] == 0;
        for (int64_t i = 0; ok && i < segments; i++) {
            int64_t extent = (int64_t)bounds[i + 1] - bounds[i];
            ok = extent >= 0 && extent % (2 * cp_count) == 0;
        }
        total = ok ? bounds[segments] : 0;
        if (!ok || source_bytes != total * item_bytes || target_bytes != source_bytes) {
            PyErr_Format(PyExc_ValueError, "bounds are no segments in multiples of %lld places "
                         "that fill both arrays", 2 * cp_count);
            ok = 0;
        }
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        deal(source, target, bounds, segments, cp_count, item_bytes);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&held);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

/* Returns the number of a span that is out of bounds, or -1. */
static int64_t copy_all(const uint8_t *source, int64_t source_bytes, uint8_t *target,
                        int64_t target_bytes, const int64_t *from, const int64_t *to,
                        const int64_t *nbytes, int64_t spans)
{
    for (int64_t i = 0; i < spans; i++) {
        int64_t size = nbytes[i];
        if (size < 0 || size > source_bytes || size > target_bytes || from[i] < 0 || to[i] < 0 ||
            from[i] > source_bytes - size || to[i] > target_bytes - size)
            return i;
    }
    for (int64_t i = 0; i < spans; i++) {
#if defined(__GNUC__)
        /* The next one lies anywhere in a pool: its page is looked up while this one is copied. */
        if (i + 1 < spans)
            __builtin_prefetch(source + from[i + 1]);
        if (i + 1 < spans && nbytes[i + 1] > 4096)
            __builtin_prefetch(source + from[i + 1] + 4096);
#endif
        memcpy(target + to[i], source + from[i], (size_t)nbytes[i]);
    }
    return -1;
}

static PyObject *copy_spans(PyObject *module, PyObject *args)
{
    (void)module;
    static const char *const names[3] = {"from", "to", "nbytes"};
    PyObject *objects[5];
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4]))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t source_bytes, target_bytes = 0, column_bytes[3] = {0};
    const int64_t *columns[3] = {NULL};
    int ok = 1;
    const uint8_t *source = take(&held, objects[0], "source", 0, 1, &source_bytes, &ok);
    uint8_t *target = ok ? take(&held, objects[1], "target", 1, 1, &target_bytes, &ok) : NULL;
    for (int k = 0; ok && k < 3; k++)
        columns[k] = take(&held, objects[2 + k], names[k], 0, 8, &column_bytes[k], &ok);
    if (ok && (column_bytes[0] != column_bytes[1] || column_bytes[0] != column_bytes[2])) {
        PyErr_SetString(PyExc_ValueError, "columns of spans have different lengths");
        ok = 0;
    }
    int64_t wrong = -1;
    if (ok && column_bytes[0]) {
        Py_BEGIN_ALLOW_THREADS
        wrong = copy_all(source, source_bytes, target, target_bytes, columns[0], columns[1],
                         columns[2], column_bytes[0] / 8);
        Py_END_ALLOW_THREADS
    }
    if (wrong >= 0)
        PyErr_Format(PyExc_ValueError, "span %lld is out of bounds", (long long)wrong);
    release_buffers(&held);
    if (!ok || wrong >= 0)
        return NULL;
    Py_RETURN_NONE;
}

#define PIECES_MAX 1024 /* IOV_MAX of Linux */

/* Fills pieces from runs of two memories, the second counted from the end of the first: at most
 * `limit` bytes behind the first `skip`. Returns how many, or -1 - the number of a span that is out
 * of bounds. */
static int64_t put_pieces(struct iovec *pieces, int64_t room, const uint8_t *pool,
                          int64_t pool_bytes, const uint8_t *own, int64_t own_bytes,
                          const int64_t *from, const int64_t *nbytes, int64_t spans, int64_t skip,
                          int64_t limit)
{
    int64_t count = 0;
    for (int64_t i = 0; i < spans && count < room && limit > 0; i++) {
        int64_t at = from[i], size = nbytes[i];
        const uint8_t *base = pool;
        int64_t base_bytes = pool_bytes;
        if (at >= pool_bytes)
            at -= pool_bytes, base = own, base_bytes = own_bytes;
        if (size < 0 || size > base_bytes || at < 0 || at > base_bytes - size)
            return -1 - i;
        if (skip >= size) {
            skip -= size;
            continue;
        }
        at += skip, size -= skip, skip = 0;
        if (size > limit)
            size = limit;
        limit -= size;
        pieces[count++] = (struct iovec){(void *)(uintptr_t)(base + at), (size_t)size};
    }
    return count;
}

static PyObject *send_spans(PyObject *module, PyObject *args)
{
    (void)module;
    static const char *const names[5] = {"head", "pool", "own", "from", "nbytes"};
    static const Py_ssize_t item_bytes[5] = {1, 1, 1, 8, 8};
    PyObject *objects[5];
    int fd;
    long long skip, limit;
    if (!PyArg_ParseTuple(args, "iOOOOOLL", &fd, &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &skip, &limit))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t sizes[5] = {0};
    const void *data[5] = {NULL};
    int ok = 1;
    for (int k = 0; ok && k < 5; k++)
        data[k] = take(&held, objects[k], names[k], 0, item_bytes[k], &sizes[k], &ok);
    if (ok && sizes[3] != sizes[4]) {
        PyErr_SetString(PyExc_ValueError, "columns of spans have different lengths");
        ok = 0;
    }
    if (ok && (skip < 0 || limit < 0)) {
        PyErr_SetString(PyExc_ValueError, "bytes to skip or to send are below 0");
        ok = 0;
    }
    struct iovec pieces[PIECES_MAX];
    int64_t count = 0;
    if (ok) {
        int has_head = sizes[0] > 0;
        pieces[0] = (struct iovec){(void *)(uintptr_t)data[0], (size_t)sizes[0]};
        count = put_pieces(pieces + has_head, PIECES_MAX - has_head, data[1], sizes[1], data[2],
                           sizes[2], data[3], data[4], sizes[3] / 8, skip, limit);
        if (count < 0) {
            PyErr_Format(PyExc_ValueError, "span %lld is out of bounds", (long long)(-1 - count));
            ok = 0;
        }
        count += has_head;
    }
    ssize_t sent = 0;
    if (ok) {
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
        Py_BEGIN_ALLOW_THREADS
        do
            sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        Py_END_ALLOW_THREADS
        if (sent < 0) {
            PyErr_SetFromErrno(PyExc_OSError);
            ok = 0;
        }
    }
    release_buffers(&held);
    return ok ? PyLong_FromSsize_t(sent) : NULL;
}

/* Where fragments lie. Header checks are those of HeaderColumns (msd_daemon/shm/chunk_header.py).
 * Returns the number of the first that is none, or -1. */
static int64_t find_all(const uint8_t *pool, int64_t pool_bytes, const int64_t *chunk_offset,
                        const int64_t *chunk_bytes, const int32_t *source, const int32_t *sample,
                        const int32_t *first_token, const int32_t *length, int64_t fragments,
                        int64_t *token_bytes, int64_t *flags_out, int64_t *first, int64_t *payload)
{
    int64_t whole = pool_bytes / HEADER_BYTES * HEADER_BYTES;
    for (int64_t i = 0; i < fragments; i++) {
        int64_t at = chunk_offset[i], room = chunk_bytes[i];
        if (at < 0 || at % CHUNK_ALIGN || room < HEADER_BYTES || room > whole || at > whole - room)
            return i;
        const uint8_t *chunk = pool + at;
        struct header h = load_header(chunk);
        if (!is_chunk(&h) || h.source != source[i] || h.records < 0)
            return i;
        if (h.payload_offset != (columns_end(&h) + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN ||
            h.payload_bytes < 0 || h.payload_bytes > room - h.payload_offset)
            return i;
        if (sample[i] < 0 || sample[i] >= h.records || first_token[i] < 0 || length[i] <= 0)
            return i;
        int64_t begin = load_i64(chunk + HEADER_BYTES + 8 * (int64_t)sample[i]);
        int64_t end = load_i64(chunk + HEADER_BYTES + 8 * (int64_t)sample[i] + 8);
        if (begin < 0 || end < begin || end > h.payload_bytes / h.width ||
            (int64_t)first_token[i] + length[i] > end - begin)
            return i;
        token_bytes[i] = h.width;
        flags_out[i] = h.flags;
        first[i] = begin + first_token[i];
        payload[i] = at + h.payload_offset + first[i] * h.width;
    }
    return -1;
}

static PyObject *find_fragments(PyObject *module, PyObject *args)
{
    (void)module;
    static const char *const names[10] = {"chunk_offset", "chunk_bytes", "source", "sample",
                                          "first_token",  "length",      "token_bytes",
                                          "flags",        "first",       "payload"};
    static const Py_ssize_t item_bytes[10] = {8, 8, 4, 4, 4, 4, 8, 8, 8, 8};
    PyObject *objects[11];
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7], &objects[8],
                          &objects[9], &objects[10]))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t pool_bytes, nbytes[10] = {0};
    void *columns[10] = {NULL};
    int ok = 1;
    const uint8_t *pool = take(&held, objects[0], "pool", 0, 1, &pool_bytes, &ok);
    for (int k = 0; ok && k < 10; k++) {
        columns[k] = take(&held, objects[1 + k], names[k], k >= 6, item_bytes[k], &nbytes[k], &ok);
        if (ok && nbytes[k] / item_bytes[k] != nbytes[0] / 8) {
            PyErr_SetString(PyExc_ValueError, "columns of fragments have different lengths");
            ok = 0;
        }
    }
    int64_t wrong = -1;
    if (ok && nbytes[0]) {
        Py_BEGIN_ALLOW_THREADS
        wrong = find_all(pool, pool_bytes, columns[0], columns[1], columns[2], columns[3],
                         columns[4], columns[5], nbytes[0] / 8, columns[6], columns[7],
                         columns[8], columns[9]);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&held);
    return ok ? PyLong_FromLongLong(wrong) : NULL;
}

/* One pass of a radix sort by 8 bits: `order` to `out`, equal digits in the order that they have. */
static void sort_digit(const void *keys, int is_wide, int shift, const int64_t *order, int64_t *out,
                       int64_t count)
{
    int64_t places[257] = {0};
    const uint64_t *wide = keys;
    const uint32_t *narrow = keys;
    /* The sign bit is turned round, so that numbers below 0 come first. */
    uint64_t flip = shift == (is_wide ? 56 : 24) ? 0x80 : 0;
#define DIGIT(i) ((((is_wide ? wide[i] : narrow[i]) >> shift) & 255) ^ flip)
    for (int64_t i = 0; i < count; i++)
        places[DIGIT(i) + 1]++;
    for (int digit = 0; digit < 256; digit++)
        places[digit + 1] += places[digit];
    for (int64_t i = 0; i < count; i++)
        out[places[DIGIT(order[i])]++] = order[i];
#undef DIGIT
}

/* Bits in which not all keys are the same. */
static uint64_t differing(const void *keys, int is_wide, int64_t count)
{
    const int64_t *wide = keys;
    const int32_t *narrow = keys;
    uint64_t found = 0;
    for (int64_t i = 1; i < count; i++)
        found |= is_wide ? (uint64_t)(wide[i] ^ wide[0]) : (uint32_t)(narrow[i] ^ narrow[0]);
    return found;
}

static PyObject *sort_columns(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *keys_tuple, *objects[2];
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &keys_tuple, &objects[0], &objects[1]))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t nbytes[2] = {0}, keys = PyTuple_Size(keys_tuple);
    int ok = 1;
    int64_t *order = take(&held, objects[0], "order", 1, 8, &nbytes[0], &ok);
    int64_t *spare = ok ? take(&held, objects[1], "spare", 1, 8, &nbytes[1], &ok) : NULL;
    int64_t count = nbytes[0] / 8;
    if (ok && (nbytes[0] != nbytes[1] || keys > BUFFERS_MAX - 2)) {
        PyErr_SetString(PyExc_ValueError, "order and spare differ in length, or keys are too many");
        ok = 0;
    }
    int is_in_order = 1; /* the result so far, else it is in `spare` */
    if (ok)
        for (int64_t i = 0; i < count; i++)
            order[i] = i;
    for (Py_ssize_t k = 0; ok && k < keys; k++) {
        Py_ssize_t key_bytes;
        PyObject *key = PyTuple_GetItem(keys_tuple, k);
        const void *data = key ? take(&held, key, "key", 0, 4, &key_bytes, &ok) : NULL;
        if (!key || !ok) {
            ok = 0;
            break;
        }
        int is_wide = key_bytes == 8 * count;
        if ((!is_wide && key_bytes != 4 * count) || (is_wide && (uintptr_t)data % 8)) {
            PyErr_SetString(PyExc_ValueError, "a key is no aligned column of 4 or 8 bytes a row");
            ok = 0;
            break;
        }
        uint64_t bits = differing(data, is_wide, count);
        for (int shift = 0; shift < (is_wide ? 64 : 32); shift += 8) {
            if (!(bits >> shift & 255))
                continue;
            sort_digit(data, is_wide, shift, is_in_order ? order : spare,
                       is_in_order ? spare : order, count);
            is_in_order = !is_in_order;
        }
    }
    if (ok && !is_in_order)
        memcpy(order, spare, (size_t)nbytes[0]);
    release_buffers(&held);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *join_runs(PyObject *module, PyObject *args)
{
    (void)module;
    static const char *const names[3] = {"target", "source", "nbytes"};
    PyObject *objects[3];
    if (!PyArg_ParseTuple(args, "OOO", &objects[0], &objects[1], &objects[2]))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t sizes[3] = {0};
    int64_t *columns[3] = {NULL};
    int ok = 1;
    for (int k = 0; ok && k < 3; k++)
        columns[k] = take(&held, objects[k], names[k], 1, 8, &sizes[k], &ok);
    if (ok && (sizes[0] != sizes[1] || sizes[0] != sizes[2])) {
        PyErr_SetString(PyExc_ValueError, "columns of spans have different lengths");
        ok = 0;
    }
    int64_t kept = 0;
    if (ok) {
        int64_t *target = columns[0], *source = columns[1], *nbytes = columns[2];
        for (int64_t i = 0, spans = sizes[0] / 8; i < spans; i++) {
            int64_t last = kept - 1;
            if (kept && target[i] == target[last] + nbytes[last] &&
                source[i] == source[last] + nbytes[last])
                nbytes[last] += nbytes[i];
            else
                target[kept] = target[i], source[kept] = source[i], nbytes[kept] = nbytes[i], kept++;
        }
    }
    release_buffers(&held);
    return ok ? PyLong_FromLongLong(kept) : NULL;
}

/* memcpy whose stores go past the caches: what is written is read much later, by another process,
 * and what it would push out is in use now. Both memories may be shared; they do not overlap. */
static void store(uint8_t *target, const uint8_t *source, size_t nbytes)
{
#if defined(__SSE2__)
    size_t head = (16 - ((uintptr_t)target & 15)) & 15;
    if (head > nbytes)
        head = nbytes;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(target, source, nbytes);
}

static PyObject *store_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[2];
    if (!PyArg_ParseTuple(args, "OO", &objects[0], &objects[1]))
        return NULL;
    struct buffers held = {.count = 0};
    Py_ssize_t source_bytes, target_bytes = 0;
    int ok = 1;
    const uint8_t *source = take(&held, objects[0], "source", 0, 1, &source_bytes, &ok);
    uint8_t *target = ok ? take(&held, objects[1], "target", 1, 1, &target_bytes, &ok) : NULL;
    if (ok && source_bytes != target_bytes) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for a place of %zd", source_bytes, target_bytes);
        ok = 0;
    }
    if (ok && source_bytes) {
        Py_BEGIN_ALLOW_THREADS
        store(target, source, (size_t)source_bytes);
        Py_END_ALLOW_THREADS
    }
    release_buffers(&held);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS,
     "gather(pool, chunk_offset, sample, sample_offset, length, row, column, source, rows, "
     "row_tokens, tokens, labels, position_ids, loss_weights, cu_seqlens, cu_seqlens_padded, "
     "segment_source, source_weights, pad_id, ignore_label, segment_multiple, flags) -> "
     "(segments, max_seqlen, valid_tokens)"},
    {"deal_documents", deal_documents, METH_VARARGS,
     "deal_documents(source, target, bounds, cp_count, item_bytes): cut every segment in "
     "2 * cp_count chunks; rank r gets chunks r and 2 * cp_count - 1 - r"},
    {"copy_spans", copy_spans, METH_VARARGS,
     "copy_spans(source, target, from, to, nbytes): copy runs of bytes, columns of int64"},
    {"send_spans", send_spans, METH_VARARGS,
     "send_spans(fd, head, pool, own, from, nbytes, skip, limit) -> bytes sent: head, then at most "
     "limit bytes of the runs behind the first skip; a run from len(pool) on lies in own"},
    {"find_fragments", find_fragments, METH_VARARGS,
     "find_fragments(pool, chunk_offset, chunk_bytes, source, sample, first_token, length, "
     "token_bytes, flags, first, payload) -> number of a fragment that lies nowhere, or -1"},
    {"join_runs", join_runs, METH_VARARGS,
     "join_runs(target, source, nbytes) -> spans: those that follow each other become one, in place"},
    {"sort_columns", sort_columns, METH_VARARGS,
     "sort_columns(keys, order, spare): the order of rows by columns, the last one first"},
    {"store_bytes", store_bytes, METH_VARARGS,
     "store_bytes(source, target): copy bytes past the caches"},
    {NULL, NULL, 0, NULL},
};

static int add_stamp(PyObject *module)
{
    return PyModule_AddStringConstant(module, "stamp", MSD_KERNEL_STAMP);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_stamp}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_doc = "Gather of one microbatch, see __init__.",
    .m_size = 0,           .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
