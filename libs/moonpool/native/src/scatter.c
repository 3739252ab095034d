/*
 * Reads whose bytes come as a stream: those of the first read's spans, one after another, then those of
 * the second's, in messages of any size.
 *
 *   stream    |------------- read 0 -------------|------------ read 1 ------------|
 *   spans     |---- span 0 ----|---- span 1 -----|-- span 0 --|------ span 1 -----|
 *   messages  |....... message .......|........ message ........|.................|
 *   leaves                     ^done_at          ^done_at                         ^done_at
 *
 * Each message is copied to where its spans lie in the pool, and each leaf is checked when its last byte
 * has been copied. A leaf that lies whole and in one run in a message is digested as it is copied; any other
 * is read back from the pool. A read's bounds are
 * checked once, before it is expected.
 *
 * Life of a read (its memory is the caller's)
 *   planned    mp_read_plan: bounds checked, starts and done_at filled in
 *   expected   mp_stream_expect, in the order in which the bytes will come
 *   done       all its bytes have come, and were written or thrown away; counted in num_done, and not
 *              touched any more
 * mp_read_abandon may come at any time: what has not been written by then is thrown away.
 */
#include "moonpool_native.h"

enum { WRITING = 1, ABANDONED = 2 };

static int fail(mp_result *result, int64_t status, int64_t index)
{
    *result = (mp_result){status, index, 0};
    return 0;
}

static int check(const mp_read *read, const mp_geometry *g, int64_t target_bytes, mp_result *result)
{
    *result = (mp_result){MP_OK, 0, 0};
    for (int64_t i = 0; i < read->num_spans; i++) {
        const int64_t to = read->spans[3 * i + 1], length = read->spans[3 * i + 2];
        if (to < 0 || length < 0 || length > target_bytes || to > target_bytes - length)
            return fail(result, MP_SPAN_OUT_OF_BOUNDS, i);
    }
    if (read->num_leaves > 0 && (!mp_geometry_is_valid(g) || g->region_bytes > target_bytes))
        return fail(result, MP_BAD_GEOMETRY, 0);
    for (int64_t i = 0; i < read->num_leaves; i++) {
        if (read->leaves[i].block < 0 || read->leaves[i].block >= g->num_blocks)
            return fail(result, MP_BLOCK_OUT_OF_BOUNDS, i);
        if (read->leaves[i].layer < 0 || read->leaves[i].layer >= g->num_layers)
            return fail(result, MP_LAYER_OUT_OF_BOUNDS, i);
        if (read->leaves[i].after_span >= read->num_spans)
            return fail(result, MP_LEAF_ORDER, i);
    }
    return 1;
}

/*
 * Check bounds, and fill in starts[num_spans], done_at[num_leaves] and num_bytes. Returns 1 if done_at
 * ascends; if it does not, the caller sorts leaves and done_at by it before the read is expected.
 */
MP_EXPORT int64_t mp_read_plan(mp_read *read, const mp_geometry *g, int64_t target_bytes,
                               mp_result *result)
{
    if (!check(read, g, target_bytes, result))
        return 0;
    int64_t end = 0;
    for (int64_t i = 0; i < read->num_spans; i++) {
        read->starts[i] = end;
        end += read->spans[3 * i + 2];
    }
    read->num_bytes = end;
    int64_t previous = 0, is_sorted = 1;
    for (int64_t i = 0; i < read->num_leaves; i++) {
        const mp_leaf *leaf = &read->leaves[i];
        int64_t done_at = 0;
        if (leaf->after_span >= 0) {
            const int64_t *span = &read->spans[3 * leaf->after_span];
            const int64_t within = mp_leaf_end(g, leaf->block, leaf->layer) - span[1];
            done_at = read->starts[leaf->after_span] +
                      (within < 0 ? 0 : within < span[2] ? within : span[2]);
        }
        read->done_at[i] = done_at;
        is_sorted &= done_at >= previous;
        previous = done_at;
    }
    return is_sorted;
}

/* True if the next bytes are the whole of the leaf, in the order of its digest. */
static int is_whole(const mp_stream *s, const mp_read *read, const mp_leaf *leaf, int64_t stop)
{
    const mp_geometry *g = s->geometry;
    const int64_t leaf_bytes = g->plane_bytes * g->num_planes;
    if (stop - read->at != leaf_bytes || !mp_leaf_is_one_run(g))
        return 0;
    const int64_t *span = &read->spans[3 * read->span];
    const int64_t within = read->at - read->starts[read->span];
    return span[2] - within >= leaf_bytes &&
           span[1] + within == mp_leaf_offset(g, leaf->block, leaf->layer);
}

static void check_leaf(mp_read *read, uint64_t digest)
{
    const uint8_t is_bad = digest != read->leaves[read->leaf].expected;
    read->is_bad[read->leaf++] = is_bad;
    read->num_bad += is_bad;
}

/* The read's next `count` bytes. */
static void scatter(const mp_stream *s, mp_read *read, const uint8_t *source, int64_t count)
{
    const mp_geometry *g = s->geometry;
    const int64_t end = read->at + count;
    for (;;) {
        const int has_leaf = read->leaf < read->num_leaves && read->done_at[read->leaf] <= end;
        const int64_t stop = has_leaf ? read->done_at[read->leaf] : end;
        if (has_leaf && is_whole(s, read, &read->leaves[read->leaf], stop)) {
            const int64_t *span = &read->spans[3 * read->span];
            const int64_t within = read->at - read->starts[read->span], part = stop - read->at;
            check_leaf(read, mp_copy_leaf(s->target + span[1] + within, source, part));
            source += part;
            read->at = stop;
            read->span += within + part == span[2];
            continue;
        }
        while (read->at < stop) {
            const int64_t *span = &read->spans[3 * read->span];
            const int64_t within = read->at - read->starts[read->span];
            const int64_t left = span[2] - within, wanted = stop - read->at;
            const int64_t part = left < wanted ? left : wanted;
            mp_copy(s->target + span[1] + within, source, part);
            source += part;
            read->at += part;
            read->span += part == left;
        }
        if (!has_leaf)
            return;
        const mp_leaf *leaf = &read->leaves[read->leaf];
        check_leaf(read, mp_leaf_digest(s->target + mp_leaf_offset(g, leaf->block, leaf->layer),
                                        g->plane_bytes, g->plane_stride, g->num_planes));
    }
}

/* By the copy thread. Returns 1 if somebody may wait for the end of this. */
int mp_read_take(const mp_stream *s, mp_read *read, const uint8_t *source, int64_t count)
{
    int64_t expected = 0;
    if (!atomic_compare_exchange_strong(&read->state, &expected, WRITING)) {
        read->at += count;
        return 0;
    }
    scatter(s, read, source, count);
    mp_copied_out();
    return (atomic_fetch_and(&read->state, ~(int64_t)WRITING) & ABANDONED) != 0;
}

/*
 * 1 if no byte of the read will be written any more; 0 if one is being written now: then the eventfd
 * rings when that is over, and this is to be called again.
 */
MP_EXPORT int64_t mp_read_abandon(mp_read *read)
{
    return !(atomic_fetch_or(&read->state, ABANDONED) & WRITING);
}

/* How many of the reads expected are done; their memory is the caller's again. */
MP_EXPORT int64_t mp_stream_num_done(mp_stream *stream) { return atomic_load(&stream->num_done); }

/* Ring once so many bytes are consumed; returns how many were until now. */
MP_EXPORT int64_t mp_stream_ring_at(mp_stream *stream, int64_t num_bytes)
{
    atomic_store(&stream->ring_at, num_bytes);
    return atomic_load(&stream->num_consumed);
}
