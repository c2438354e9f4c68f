#include "loads.h"

#include <string.h>

void sort_loads(struct load *at, struct load *spare, int64_t count)
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
