/*
 * A read whose bytes come as a stream: the bytes of its spans, one after another, in parts of any size.
 *
 *   stream    |---- span 0 ----|-- span 1 --|------- span 2 -------|
 *   parts     |....... part .......|........ part ........|........|
 *   leaves                      ^done_at        ^done_at           ^done_at
 *
 * Each part is copied to where its spans lie in the pool, and each leaf is checked when the part that
 * brings its last byte has been copied that far, while it is in the cache. Parts of one stream are given
 * in order by one thread; nothing is remembered between them.
 */
#include "moonpool_native.h"

#include <string.h>

/* The first of `values` that is greater than `key`. */
static int64_t upper_bound(const int64_t *values, int64_t count, int64_t key)
{
    int64_t low = 0;
    while (low < count) {
        const int64_t middle = low + (count - low) / 2;
        if (values[middle] > key)
            count = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int check(const mp_stream *s, int64_t first_leaf, int64_t first_span, int64_t end,
                 mp_result *result)
{
    const mp_geometry *g = s->geometry;
    *result = (mp_result){MP_OK, 0, 0};
    for (int64_t i = first_span; i < s->num_spans && s->starts[i] < end; i++) {
        const int64_t to = s->spans[3 * i + 1], length = s->spans[3 * i + 2];
        if (to < 0 || length < 0 || length > s->target_bytes || to > s->target_bytes - length) {
            *result = (mp_result){MP_SPAN_OUT_OF_BOUNDS, i, 0};
            return 0;
        }
    }
    if (s->num_leaves > 0 && (!mp_geometry_is_valid(g) || g->region_bytes > s->target_bytes)) {
        *result = (mp_result){MP_BAD_GEOMETRY, 0, 0};
        return 0;
    }
    for (int64_t i = first_leaf; i < s->num_leaves && s->done_at[i] <= end; i++) {
        if (s->leaves[i].block < 0 || s->leaves[i].block >= g->num_blocks) {
            *result = (mp_result){MP_BLOCK_OUT_OF_BOUNDS, i, 0};
            return 0;
        }
        if (s->leaves[i].layer < 0 || s->leaves[i].layer >= g->num_layers) {
            *result = (mp_result){MP_LAYER_OUT_OF_BOUNDS, i, 0};
            return 0;
        }
    }
    return 1;
}

/* `source` holds bytes [begin, begin + source_bytes) of the stream. */
void mp_scatter_verify(const mp_stream *s, const uint8_t *source, int64_t source_bytes,
                       int64_t begin, mp_result *result)
{
    const mp_geometry *g = s->geometry;
    const int64_t end = begin + source_bytes;
    int64_t leaf = begin == 0 ? 0 : upper_bound(s->done_at, s->num_leaves, begin);
    int64_t span = upper_bound(s->starts, s->num_spans, begin) - 1;
    if (span < 0)
        span = 0;
    if (!check(s, leaf, span, end, result))
        return;
    int64_t at = begin;
    for (;;) {
        const int has_leaf = leaf < s->num_leaves && s->done_at[leaf] <= end;
        const int64_t stop = has_leaf ? s->done_at[leaf] : end;
        while (at < stop && span < s->num_spans) {
            const int64_t within = at - s->starts[span], length = s->spans[3 * span + 2];
            const int64_t left = length - within, wanted = stop - at;
            const int64_t count = left < wanted ? left : wanted;
            memcpy(s->target + s->spans[3 * span + 1] + within, source + (at - begin),
                   (size_t)count);
            at += count;
            if (count == left)
                span++;
        }
        if (!has_leaf)
            return;
        const uint64_t digest =
            mp_leaf_digest(s->target + mp_leaf_offset(g, s->leaves[leaf].block,
                                                      s->leaves[leaf].layer),
                           g->plane_bytes, g->plane_stride, g->num_planes);
        s->is_bad[leaf] = digest != s->leaves[leaf].expected;
        result->num_bad += s->is_bad[leaf];
        leaf++;
    }
}
