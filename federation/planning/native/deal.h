/* Items that are dealt to buckets under caps. */
#ifndef MSD_DEAL_H
#define MSD_DEAL_H

#include "buffers.h"
#include "loads.h"

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

/* Takes costs, sizes, caps, bucket_of and loads; returns 0, or -1 with an error and nothing held. */
int take_deal(struct deal *d, struct buffers *held, PyObject *const objects[5]);

#endif
