#include "deal.h"

int take_deal(struct deal *d, struct buffers *held, PyObject *const objects[5])
{
    int64_t size_items = -1;
    d->count = d->kinds = d->buckets = -1;
    if (!(d->costs = take(held, objects[0], "costs", 0, &d->count)) ||
        !(d->sizes = take(held, objects[1], "sizes", 0, &size_items)) ||
        !(d->caps = take(held, objects[2], "caps", 0, &d->kinds)) ||
        !(d->bucket_of = take(held, objects[3], "bucket_of", 1, &d->count)) ||
        !(d->loads = take(held, objects[4], "loads", 1, &d->buckets))) {
        release_buffers(held);
        return -1;
    }
    if (d->buckets < 1 || size_items != d->kinds * d->count) {
        refuse(held, "costs, sizes, caps and buckets do not fit each other");
        return -1;
    }
    return 0;
}
