/* Two loops over pixels: an antialiased resize and the cut into patches. Owns nothing else.
 *
 * The resize gives the bytes of Pillow's 8-bit resize, which stands in where this was not built
 * (image_resize.py): two passes, weights in double, rounded to 22 bits, sums in 32-bit integers,
 * a row of bytes in between. The patches are those of image_patches.py's numpy form.
 *
 * Runs without the GIL. Limited API (3.11), buffer protocol only. Sizes are checked against the
 * buffers here; what the caller decides (limits, policies) is not.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2_BUILD 1
#define AVX2 __attribute__((target("avx2"), optimize("O3")))
#else
#define HAS_AVX2_BUILD 0
#endif

/* Wider vectors where the machine has them, chosen once by the loader (glibc only). */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif

#define CHANNELS 3
#define PRECISION_BITS 22
#define LOW_BITS 11
#define SIDE_MAX (1 << 20)
#define SHORT_RUN 16 /* bytes; copied as one vector */
/* Vector loads read a few bytes behind the taps of the last pixels; rows that could be short of
 * them go the plain way. */
#define TAPS_READ 16

enum { FILTER_BICUBIC = 0, FILTER_BILINEAR = 1, FILTER_LANCZOS = 2 };

struct weights {
    int64_t taps_max; /* of an output place, rounded up to a multiple of 4 */
    int32_t *first;   /* first input place of each output place */
    int32_t *count;   /* input places of each */
    int32_t *value;   /* taps_max of each, zero behind count */
    int16_t *pairs;   /* AVX2: high and low halves as the shuffled bytes meet them */
    int32_t *groups;  /* AVX2: groups of 4 taps of each output place */
    int64_t wide;     /* AVX2: output places from the left that vectors make */
};

/* ---- weights -------------------------------------------------------------------------------- */

static double bicubic(double x)
{
    const double a = -0.5;
    if (x < 0.0)
        x = -x;
    if (x < 1.0)
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0)
        return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

static double bilinear(double x)
{
    if (x < 0.0)
        x = -x;
    return x < 1.0 ? 1.0 - x : 0.0;
}

static double sinc(double x)
{
    if (x == 0.0)
        return 1.0;
    x *= M_PI;
    return sin(x) / x;
}

static double lanczos(double x)
{
    return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
}

static void free_weights(struct weights *w)
{
    free(w->first);
    free(w->count);
    free(w->value);
    free(w->pairs);
    free(w->groups);
}

/* Pairs: for 4 taps 16 numbers of the high half, then 16 of the low one, in the order that the
 * shuffle in `across_avx2` gives the bytes: (tap 0, tap 1) of the 3 channels and of nothing, then
 * (tap 2, tap 3). value == high * 2^11 + low, low in 0..2047. */
static int pair_weights(struct weights *w, int64_t out)
{
    w->pairs = malloc((size_t)(out * w->taps_max) * 8 * sizeof(int16_t));
    if (!w->pairs)
        return 0;
    int16_t *to = w->pairs;
    for (int64_t i = 0; i < out * w->taps_max; i += 4, to += 32)
        for (int half = 0; half < 2; half++)
            for (int channel = 0; channel < 4; channel++)
                for (int tap = 0; tap < 2; tap++) {
                    int32_t k = w->value[i + 2 * half + tap];
                    int32_t high = k >> LOW_BITS, low = k - high * (1 << LOW_BITS);
                    to[half * 8 + channel * 2 + tap] = (int16_t)high;
                    to[16 + half * 8 + channel * 2 + tap] = (int16_t)low;
                }
    return 1;
}

/* `extent`: how much of the `in` places is the picture, at most all of them; the last one may be a
 * part of a pixel (a JPEG that was decoded smaller). */
static int make_weights(struct weights *w, int64_t in, double extent, int64_t out, int filter)
{
    static double (*const functions[])(double) = {bicubic, bilinear, lanczos};
    static const double supports[] = {2.0, 1.0, 3.0};
    double scale = extent / (double)out, filter_scale = scale < 1.0 ? 1.0 : scale;
    double support = supports[filter] * filter_scale;
    int64_t taps = ((int64_t)ceil(support)) * 2 + 1;
    w->taps_max = (taps + 3) / 4 * 4;
    w->first = malloc((size_t)out * sizeof(int32_t));
    w->count = malloc((size_t)out * sizeof(int32_t));
    w->value = calloc((size_t)(out * w->taps_max), sizeof(int32_t));
    double *exact = malloc((size_t)taps * sizeof(double));
    if (!w->first || !w->count || !w->value || !exact) {
        free(exact);
        return 0;
    }
    for (int64_t i = 0; i < out; i++) {
        double center = ((double)i + 0.5) * scale, sum = 0.0, step = 1.0 / filter_scale;
        int64_t low = (int64_t)(center - support + 0.5), high = (int64_t)(center + support + 0.5);
        low = low < 0 ? 0 : low;
        high = high > in ? in : high;
        for (int64_t x = low; x < high; x++) {
            exact[x - low] = functions[filter](((double)x - center + 0.5) * step);
            sum += exact[x - low];
        }
        w->first[i] = (int32_t)low;
        w->count[i] = (int32_t)(high - low);
        for (int64_t x = 0; x < high - low; x++) {
            double k = (sum != 0.0 ? exact[x] / sum : exact[x]) * (1 << PRECISION_BITS);
            w->value[i * w->taps_max + x] = (int32_t)(k < 0 ? k - 0.5 : k + 0.5);
        }
    }
    free(exact);
    return 1;
}

/* ---- passes --------------------------------------------------------------------------------- */

static inline uint8_t clip8(int32_t sum)
{
    sum >>= PRECISION_BITS;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

static void across_plain(const uint8_t *from, uint8_t *to, int64_t begin, int64_t end,
                         const struct weights *w)
{
    for (int64_t x = begin; x < end; x++) {
        const int32_t *k = w->value + x * w->taps_max;
        const uint8_t *pixel = from + (int64_t)w->first[x] * CHANNELS;
        int32_t r = 1 << (PRECISION_BITS - 1), g = r, b = r;
        for (int32_t t = 0; t < w->count[x]; t++, pixel += CHANNELS) {
            r += pixel[0] * k[t];
            g += pixel[1] * k[t];
            b += pixel[2] * k[t];
        }
        to[x * CHANNELS] = clip8(r);
        to[x * CHANNELS + 1] = clip8(g);
        to[x * CHANNELS + 2] = clip8(b);
    }
}

#define DOWN_BODY                                                                                  \
    for (int64_t x = 0; x < bytes; x += 64) {                                                      \
        int32_t sums[64];                                                                          \
        int64_t width = bytes - x < 64 ? bytes - x : 64;                                           \
        if (width == 64) {                                                                         \
            for (int i = 0; i < 64; i++)                                                           \
                sums[i] = 1 << (PRECISION_BITS - 1);                                               \
            for (int32_t t = 0; t < count; t++) {                                                  \
                const uint8_t *row = from + (int64_t)t * bytes + x;                                \
                for (int i = 0; i < 64; i++)                                                       \
                    sums[i] += row[i] * k[t];                                                      \
            }                                                                                      \
            for (int i = 0; i < 64; i++)                                                           \
                to[x + i] = clip8(sums[i]);                                                        \
        } else {                                                                                   \
            for (int64_t i = 0; i < width; i++) {                                                  \
                int32_t sum = 1 << (PRECISION_BITS - 1);                                           \
                for (int32_t t = 0; t < count; t++)                                                \
                    sum += from[(int64_t)t * bytes + x + i] * k[t];                                \
                to[x + i] = clip8(sum);                                                            \
            }                                                                                      \
        }                                                                                          \
    }

static void down_plain(const uint8_t *from, uint8_t *to, int64_t bytes, const int32_t *k,
                       int32_t count)
{
    DOWN_BODY
}

#if HAS_AVX2_BUILD
AVX2 static void down_avx2(const uint8_t *from, uint8_t *to, int64_t bytes, const int32_t *k,
                           int32_t count)
{
    int64_t x = 0;
    const __m256i half = _mm256_set1_epi32(1 << (PRECISION_BITS - 1));
    for (; x + 32 <= bytes; x += 32) {
        __m256i s0 = half, s1 = half, s2 = half, s3 = half;
        const uint8_t *row = from + x;
        for (int32_t t = 0; t < count; t++, row += bytes) {
            __m256i weight = _mm256_set1_epi32(k[t]);
            s0 = _mm256_add_epi32(s0, _mm256_mullo_epi32(weight, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)row))));
            s1 = _mm256_add_epi32(s1, _mm256_mullo_epi32(weight, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + 8)))));
            s2 = _mm256_add_epi32(s2, _mm256_mullo_epi32(weight, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + 16)))));
            s3 = _mm256_add_epi32(s3, _mm256_mullo_epi32(weight, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + 24)))));
        }
        s0 = _mm256_packs_epi32(_mm256_srai_epi32(s0, PRECISION_BITS), _mm256_srai_epi32(s1, PRECISION_BITS));
        s2 = _mm256_packs_epi32(_mm256_srai_epi32(s2, PRECISION_BITS), _mm256_srai_epi32(s3, PRECISION_BITS));
        s0 = _mm256_packus_epi16(s0, s2);
        s0 = _mm256_permutevar8x32_epi32(s0, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(to + x), s0);
    }
    for (; x < bytes; x++) {
        int32_t sum = 1 << (PRECISION_BITS - 1);
        for (int32_t t = 0; t < count; t++)
            sum += from[(int64_t)t * bytes + x] * k[t];
        to[x] = clip8(sum);
    }
}

/* One output pixel from groups of 4 taps: 16 bytes hold 5 pixels, the shuffle puts the channels of
 * two taps side by side as 16-bit numbers, so that one multiply-add sums both. The two lanes of the
 * result are still to be added. */
AVX2 static inline __attribute__((always_inline)) __m256i pixel_avx2(const uint8_t *pixel,
                                                                     const __m256i *k,
                                                                     int32_t groups)
{
    const __m256i places = _mm256_setr_epi8(
        0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
        6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    __m256i taps = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)pixel)), places);
    __m256i high = _mm256_madd_epi16(taps, _mm256_loadu_si256(k));
    __m256i low = _mm256_madd_epi16(taps, _mm256_loadu_si256(k + 1));
    for (int32_t g = 1; g < groups; g++) {
        pixel += 4 * CHANNELS;
        k += 2;
        taps = _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)pixel)), places);
        high = _mm256_add_epi32(high, _mm256_madd_epi16(taps, _mm256_loadu_si256(k)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(taps, _mm256_loadu_si256(k + 1)));
    }
    return _mm256_add_epi32(low, _mm256_slli_epi32(high, LOW_BITS));
}

AVX2 static void across_avx2(const uint8_t *from, uint8_t *to, int64_t out, const struct weights *w)
{
    const __m256i half = _mm256_set1_epi32(1 << (PRECISION_BITS - 1));
    const __m128i bytes_of_4 =
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int64_t stride = w->taps_max / 4 * 2, x = 0;
    for (; x < w->wide; x += 4) {
        __m256i sums[4];
        for (int i = 0; i < 4; i++)
            sums[i] = pixel_avx2(from + (int64_t)w->first[x + i] * CHANNELS,
                                 (const __m256i *)w->pairs + (x + i) * stride, w->groups[x + i]);
        /* Pixels 0 and 2 side by side, and 1 and 3: packs then puts them in order. */
        __m256i even = _mm256_add_epi32(_mm256_permute2x128_si256(sums[0], sums[2], 0x20),
                                        _mm256_permute2x128_si256(sums[0], sums[2], 0x31));
        __m256i odd = _mm256_add_epi32(_mm256_permute2x128_si256(sums[1], sums[3], 0x20),
                                       _mm256_permute2x128_si256(sums[1], sums[3], 0x31));
        even = _mm256_srai_epi32(_mm256_add_epi32(even, half), PRECISION_BITS);
        odd = _mm256_srai_epi32(_mm256_add_epi32(odd, half), PRECISION_BITS);
        __m256i pairs = _mm256_packs_epi32(even, odd);
        __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                          _mm256_extracti128_si256(pairs, 1));
        /* 16 bytes are written for 12; the 4 behind belong to pixels still to come. */
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm_shuffle_epi8(packed, bytes_of_4));
    }
    across_plain(from, to, x, out, w);
}

/* Counts the output places from the left, a multiple of 4, whose vector loads stay inside a row
 * and whose stores stay before its last two pixels. */
static int plan_wide(struct weights *w, int64_t in, int64_t out)
{
    w->groups = malloc((size_t)out * sizeof(int32_t));
    if (!w->groups || !pair_weights(w, out))
        return 0;
    int64_t inside = 0;
    for (int64_t x = 0; x < out; x++) {
        w->groups[x] = (w->count[x] + 3) / 4;
        int64_t last = (w->first[x] + (w->groups[x] - 1) * 4LL) * CHANNELS;
        if (w->groups[x] > 0 && inside == x && last + TAPS_READ <= in * CHANNELS && x + 2 < out)
            inside = x + 1;
    }
    w->wide = inside / 4 * 4;
    return 1;
}
#endif

struct pass {
    int64_t in, out; /* places */
    struct weights weights;
    int is_wide; /* by AVX2 */
};

static int open_pass(struct pass *p, int64_t in, double extent, int64_t out, int filter, int is_across)
{
    p->in = in;
    p->out = out;
    p->is_wide = 0;
    if (!make_weights(&p->weights, in, extent, out, filter))
        return 0;
#if HAS_AVX2_BUILD
    if (__builtin_cpu_supports("avx2"))
        p->is_wide = !is_across || plan_wide(&p->weights, in, out);
#else
    (void)is_across;
#endif
    return 1;
}

static void across(const uint8_t *row, uint8_t *to, const struct pass *p)
{
#if HAS_AVX2_BUILD
    if (p->is_wide) {
        across_avx2(row, to, p->out, &p->weights);
        return;
    }
#endif
    across_plain(row, to, 0, p->out, &p->weights);
}

/* Makes row `y` of the output from the rows of `from`, each `bytes` long. */
static void down(const uint8_t *from, int64_t bytes, int64_t y, uint8_t *to, const struct pass *p)
{
    const uint8_t *first = from + p->weights.first[y] * bytes;
    const int32_t *k = p->weights.value + y * p->weights.taps_max;
#if HAS_AVX2_BUILD
    if (p->is_wide) {
        down_avx2(first, to, bytes, k, p->weights.count[y]);
        return;
    }
#endif
    down_plain(first, to, bytes, k, p->weights.count[y]);
}

/* Both passes row by row, so that what one gives is still in the cache when the other takes it.
 * Across goes first, unless the picture loses more than twice as many rows as columns: Pillow 13
 * does so, and the bytes between the passes are rounded, so that the order shows. */
static int resize_rows(const uint8_t *from, uint8_t *to, const struct pass *rows,
                       const struct pass *columns)
{
    int64_t in_bytes = columns->in * CHANNELS, out_bytes = columns->out * CHANNELS;
    int is_down_first = rows->in - rows->out > 0 &&
                        rows->in - rows->out > 2 * (columns->in - columns->out);
    uint8_t *between = malloc((size_t)(is_down_first ? in_bytes : rows->in * out_bytes));
    if (!between)
        return 0;
    int64_t done = 0;
    for (int64_t y = 0; y < rows->out; y++) {
        if (is_down_first) {
            down(from, in_bytes, y, between, rows);
            across(between, to + y * out_bytes, columns);
            continue;
        }
        for (; done < rows->weights.first[y] + rows->weights.count[y]; done++)
            across(from + done * in_bytes, between + done * out_bytes, columns);
        down(between, out_bytes, y, to + y * out_bytes, rows);
    }
    free(between);
    return 1;
}

static int resize_picture(const uint8_t *from, int64_t in_h, int64_t in_w, double extent_h,
                          double extent_w, uint8_t *to, int64_t out_h, int64_t out_w, int filter)
{
    int is_same_h = in_h == out_h && extent_h == (double)in_h;
    int is_same_w = in_w == out_w && extent_w == (double)in_w;
    if (is_same_h && is_same_w) {
        memcpy(to, from, (size_t)(in_h * in_w) * CHANNELS);
        return 1;
    }
    struct pass rows = {0}, columns = {0};
    int ok = (is_same_h || open_pass(&rows, in_h, extent_h, out_h, filter, 0)) &&
             (is_same_w || open_pass(&columns, in_w, extent_w, out_w, filter, 1));
    if (ok && is_same_h)
        for (int64_t y = 0; y < in_h; y++)
            across(from + y * in_w * CHANNELS, to + y * out_w * CHANNELS, &columns);
    else if (ok && is_same_w)
        for (int64_t y = 0; y < out_h; y++)
            down(from, in_w * CHANNELS, y, to + y * in_w * CHANNELS, &rows);
    else if (ok)
        ok = resize_rows(from, to, &rows, &columns);
    free_weights(&rows.weights);
    free_weights(&columns.weights);
    return ok;
}

/* ---- patches -------------------------------------------------------------------------------- */

struct cut {
    int64_t frames, height, width;  /* of the input; frames divides by `temporal` unless it is 1 */
    int64_t patch, temporal, merge; /* pixels, frames, patches */
    int64_t item_bytes;             /* of an output value: 1 without a table */
    int channels_first;             /* values (channel, frame, row, column), else (frame, row, column, channel) */
};

WIDE static void convert_row(const uint8_t *from, uint8_t *to, int64_t pixels, const struct cut *c,
                        const uint8_t *table)
{
    int64_t values = pixels * CHANNELS;
    if (c->item_bytes == 1) {
        if (!c->channels_first) {
            memcpy(to, from, (size_t)values);
            return;
        }
        for (int64_t i = 0; i < pixels; i++) {
            to[i] = from[i * 3];
            to[pixels + i] = from[i * 3 + 1];
            to[2 * pixels + i] = from[i * 3 + 2];
        }
        return;
    }
    for (int channel = 0; channel < CHANNELS; channel++) {
        const uint8_t *own = table + channel * 256 * c->item_bytes;
        int64_t step = c->channels_first ? 1 : CHANNELS;
        int64_t start = c->channels_first ? channel * pixels : channel;
        if (c->item_bytes == 4) {
            uint32_t *target = (uint32_t *)to + start;
            for (int64_t i = 0; i < pixels; i++)
                target[i * step] = ((const uint32_t *)own)[from[i * CHANNELS + channel]];
        } else {
            uint16_t *target = (uint16_t *)to + start;
            for (int64_t i = 0; i < pixels; i++)
                target[i * step] = ((const uint16_t *)own)[from[i * CHANNELS + channel]];
        }
    }
}

/* Writes one row of pixels, converted, to the lines of its patches. `first`: the line of the first
 * patch in it; `place`: bytes from there to the patch of each column. */
static void deal_row(const uint8_t *row, uint8_t *first, const int64_t *place, const struct cut *c,
                     int is_last_line)
{
    int64_t columns = c->width / c->patch, item = c->item_bytes;
    int64_t planes = c->channels_first ? CHANNELS : 1;
    int64_t run = c->patch * item * (c->channels_first ? 1 : CHANNELS);
    int64_t copies = c->frames == 1 ? c->temporal : 1;
    /* The few bytes too many lie in the patch's next line, still to come. */
    int is_short = run <= SHORT_RUN && 2 * run >= SHORT_RUN && !is_last_line;
    for (int64_t plane = 0; plane < planes; plane++)
        for (int64_t copy = 0; copy < copies; copy++) {
            uint8_t *line = first + (plane * c->temporal + copy) * c->patch * run;
            const uint8_t *piece = row + plane * c->width * item;
            if (is_short)
                for (int64_t column = 0; column < columns; column++)
                    memcpy(line + place[column], piece + column * run, SHORT_RUN);
            else
                for (int64_t column = 0; column < columns; column++)
                    memcpy(line + place[column], piece + column * run, (size_t)run);
        }
}

/* An image's single frame is written `temporal` times. */
static int cut_patches(const uint8_t *from, uint8_t *to, const struct cut *c, const uint8_t *table)
{
    int64_t rows = c->height / c->patch, columns = c->width / c->patch, item = c->item_bytes;
    int64_t patch_bytes = c->temporal * c->patch * c->patch * CHANNELS * item, m = c->merge;
    int64_t run = c->patch * item * (c->channels_first ? 1 : CHANNELS);
    uint8_t *row = malloc((size_t)(c->width * CHANNELS * item) + SHORT_RUN);
    int64_t *place = malloc((size_t)columns * sizeof(int64_t));
    int ok = row && place;
    for (int64_t column = 0; ok && column < columns; column++)
        place[column] = (column / m * m * m + column % m) * patch_bytes;
    for (int64_t frame = 0; ok && frame < c->frames; frame++)
        for (int64_t y = 0; y < c->height; y++) {
            int64_t r = y / c->patch, inside = y % c->patch;
            int64_t patch = (frame / c->temporal * rows + r / m * m) * columns + r % m * m;
            int64_t line = frame % c->temporal * c->patch + inside;
            convert_row(from + (frame * c->height + y) * c->width * CHANNELS, row, c->width, c, table);
            deal_row(row, to + patch * patch_bytes + line * run, place, c, inside + 1 == c->patch);
        }
    free(row);
    free(place);
    return ok;
}

/* ---- Python --------------------------------------------------------------------------------- */

static int take(PyObject *object, Py_buffer *buffer, int flags, int64_t bytes, const char *name)
{
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return 0;
    if (buffer->len == bytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %lld", name, buffer->len,
                 (long long)bytes);
    PyBuffer_Release(buffer);
    return 0;
}

static int sides_fit(long long a, long long b)
{
    if (a > 0 && b > 0 && a <= SIDE_MAX && b <= SIDE_MAX)
        return 1;
    PyErr_Format(PyExc_ValueError, "sizes are 1 to %d, these are %lld and %lld", SIDE_MAX, a, b);
    return 0;
}

static PyObject *resize(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *source, *target;
    long long in_h, in_w, out_h, out_w;
    double extent_h, extent_w;
    int filter;
    if (!PyArg_ParseTuple(args, "OLLddOLLi", &source, &in_h, &in_w, &extent_h, &extent_w, &target,
                          &out_h, &out_w, &filter))
        return NULL;
    if (!sides_fit(in_h, in_w) || !sides_fit(out_h, out_w))
        return NULL;
    if (!(extent_h > 0 && extent_h <= (double)in_h && extent_w > 0 && extent_w <= (double)in_w)) {
        PyErr_SetString(PyExc_ValueError, "the extent is no part of the source");
        return NULL;
    }
    if (filter < FILTER_BICUBIC || filter > FILTER_LANCZOS)
        return PyErr_Format(PyExc_ValueError, "filter %d is none of 0 to 2", filter);
    Py_buffer from, to;
    if (!take(source, &from, PyBUF_C_CONTIGUOUS, in_h * in_w * CHANNELS, "source"))
        return NULL;
    if (!take(target, &to, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, out_h * out_w * CHANNELS, "target")) {
        PyBuffer_Release(&from);
        return NULL;
    }
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = resize_picture(from.buf, in_h, in_w, extent_h, extent_w, to.buf, out_h, out_w, filter);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!ok)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int cut_fits(const struct cut *c)
{
    if (!sides_fit(c->height, c->width) || !sides_fit(c->frames, c->patch) ||
        !sides_fit(c->temporal, c->merge))
        return 0;
    int64_t side = c->patch * c->merge;
    if (c->height % side || c->width % side || (c->frames != 1 && c->frames % c->temporal)) {
        PyErr_SetString(PyExc_ValueError, "frames are no whole number of patches");
        return 0;
    }
    if (c->item_bytes != 1 && c->item_bytes != 2 && c->item_bytes != 4) {
        PyErr_SetString(PyExc_ValueError, "values have 1, 2 or 4 bytes");
        return 0;
    }
    return 1;
}

static PyObject *patchify(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *source, *target, *table;
    long long frames, height, width, patch, temporal, merge, item_bytes;
    int channels_first;
    if (!PyArg_ParseTuple(args, "OLLLOLLLpOL", &source, &frames, &height, &width, &target, &patch,
                          &temporal, &merge, &channels_first, &table, &item_bytes))
        return NULL;
    struct cut c = {frames, height, width, patch, temporal, merge, item_bytes, channels_first};
    if (!cut_fits(&c))
        return NULL;
    int64_t groups = frames == 1 ? 1 : frames / temporal;
    Py_buffer from, to, values;
    if (!take(source, &from, PyBUF_C_CONTIGUOUS, frames * height * width * CHANNELS, "source"))
        return NULL;
    int64_t bytes = groups * temporal * height * width * CHANNELS * item_bytes;
    if (!take(target, &to, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, bytes, "target")) {
        PyBuffer_Release(&from);
        return NULL;
    }
    int64_t table_bytes = item_bytes == 1 ? 0 : CHANNELS * 256 * item_bytes;
    if (!take(table, &values, PyBUF_C_CONTIGUOUS, table_bytes, "table")) {
        PyBuffer_Release(&from);
        PyBuffer_Release(&to);
        return NULL;
    }
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = cut_patches(from.buf, to.buf, &c, values.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    PyBuffer_Release(&values);
    if (!ok)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"resize", resize, METH_VARARGS,
     "resize(source, in_h, in_w, extent_h, extent_w, target, out_h, out_w, filter): RGB bytes, "
     "filter 0 bicubic, "
     "1 bilinear, 2 lanczos"},
    {"patchify", patchify, METH_VARARGS,
     "patchify(source, frames, height, width, target, patch, temporal, merge, channels_first, "
     "table, item_bytes): RGB frames to patches; table: 3 x 256 values of item_bytes, or empty"},
    {NULL, NULL, 0, NULL},
};

static int add_stamp(PyObject *module)
{
    return PyModule_AddStringConstant(module, "stamp", MSD_KERNEL_STAMP);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_stamp}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_image_kernel", .m_doc = "Resize and patches of RGB bytes.",
    .m_size = 0,           .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__image_kernel(void) { return PyModuleDef_Init(&definition); }
