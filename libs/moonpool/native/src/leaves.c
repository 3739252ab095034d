/* Leaf digests in a pool: written by whoever computed the blocks, verified by whoever copied them. */
#include "moonpool_native.h"

#include <string.h>

static int fits(int64_t count, int64_t stride, int64_t *last)
{
    int64_t reach;
    if (count < 1 || stride < 0 || __builtin_mul_overflow(count - 1, stride, &reach))
        return 0;
    return !__builtin_add_overflow(*last, reach, last);
}

int mp_geometry_is_valid(const mp_geometry *g)
{
    int64_t end = g->first_byte;
    if (g->first_byte < 0 || g->plane_bytes < 1 || g->block_size < 1 || g->token_bytes < 1)
        return 0;
    if (g->plane_bytes % (g->block_size * g->token_bytes) != 0)
        return 0;
    if (!fits(g->num_blocks, g->block_stride, &end) || !fits(g->num_layers, g->layer_stride, &end) ||
        !fits(g->num_planes, g->plane_stride, &end))
        return 0;
    return !__builtin_add_overflow(end, g->plane_bytes, &end) && end <= g->region_bytes;
}

static inline uint64_t digest_of(const uint8_t *pool, const mp_geometry *g, int64_t block,
                                 int64_t layer)
{
    return mp_leaf_digest(pool + mp_leaf_offset(g, block, layer), g->plane_bytes, g->plane_stride,
                          g->num_planes);
}

static int fail(mp_result *result, int64_t status, int64_t index)
{
    result->status = status;
    result->index = index;
    return 0;
}

static int check_blocks(const mp_geometry *g, const int32_t *ids, int64_t count, int64_t step,
                        int64_t layer, mp_result *result)
{
    *result = (mp_result){MP_OK, 0, 0};
    if (!mp_geometry_is_valid(g))
        return fail(result, MP_BAD_GEOMETRY, 0);
    if (layer < 0 || layer >= g->num_layers)
        return fail(result, MP_LAYER_OUT_OF_BOUNDS, 0);
    for (int64_t i = 0; i < count; i++)
        if (ids[i * step] < 0 || ids[i * step] >= g->num_blocks)
            return fail(result, MP_BLOCK_OUT_OF_BOUNDS, i);
    return 1;
}

/* `tails` is int32[count, 2] of (block, first unused slot). */
static int check_tails(const mp_geometry *g, const int32_t *tails, int64_t count, int64_t layer,
                       mp_result *result)
{
    if (!check_blocks(g, tails, count, 2, layer, result))
        return 0;
    for (int64_t i = 0; i < count; i++)
        if (tails[2 * i + 1] < 0 || tails[2 * i + 1] > g->block_size)
            return fail(result, MP_SLOT_OUT_OF_BOUNDS, i);
    return 1;
}

static void write_leaves(const uint8_t *pool, const mp_geometry *g, const int32_t *ids,
                         int64_t count, int64_t layer, uint64_t *leaves)
{
    for (int64_t i = 0; i < count; i++)
        leaves[ids[i] * g->num_layers + layer] = digest_of(pool, g, ids[i], layer);
}

static void zero_tails(uint8_t *pool, const mp_geometry *g, const int32_t *tails, int64_t count,
                       int64_t layer)
{
    const int64_t head_bytes = g->block_size * g->token_bytes;
    for (int64_t i = 0; i < count; i++) {
        const int64_t used = tails[2 * i + 1] * g->token_bytes;
        for (int64_t plane = 0; plane < g->num_planes; plane++) {
            uint8_t *at = pool + mp_leaf_offset(g, tails[2 * i], layer) + plane * g->plane_stride;
            for (int64_t head = 0; head < g->plane_bytes; head += head_bytes)
                memset(at + head + used, 0, (size_t)(head_bytes - used));
        }
    }
}

/* leaves[block, layer] = digest, for every block of `ids`. */
MP_EXPORT void mp_write_leaves(const uint8_t *pool, const mp_geometry *g, const int32_t *ids,
                               int64_t count, int64_t layer, uint64_t *leaves, mp_result *result)
{
    if (check_blocks(g, ids, count, 1, layer, result))
        write_leaves(pool, g, ids, count, layer, leaves);
}

/* Zero the slots [first unused, block_size) of one layer. */
MP_EXPORT void mp_zero_tails(uint8_t *pool, const mp_geometry *g, const int32_t *tails,
                             int64_t count, int64_t layer, mp_result *result)
{
    if (check_tails(g, tails, count, layer, result))
        zero_tails(pool, g, tails, count, layer);
}

/* is_bad[i] = 1 where the digest of (block, layer) differs from `expected`; `after_span` is unused. */
MP_EXPORT void mp_verify_leaves(const uint8_t *pool, const mp_geometry *g, const mp_leaf *leaves,
                                int64_t count, uint8_t *is_bad, mp_result *result)
{
    mp_copy_verify(NULL, 0, (uint8_t *)pool, g->region_bytes, NULL, 0, g, leaves, count, is_bad,
                   result);
}

/*
 * What the engine does when a layer is computed, in one call: zero the tails, write the leaves,
 * publish (step, layer + 1), ring. Nothing is written if a row of either list is out of bounds.
 */
MP_EXPORT void mp_finish_layer(uint8_t *pool, const mp_geometry *g, const int32_t *ids,
                               int64_t num_ids, const int32_t *tails, int64_t num_tails,
                               int64_t layer, uint64_t *leaves, void *page, uint64_t step,
                               uint32_t layers_done, int32_t eventfd, mp_result *result)
{
    if (!check_tails(g, tails, num_tails, layer, result) ||
        !check_blocks(g, ids, num_ids, 1, layer, result))
        return;
    zero_tails(pool, g, tails, num_tails, layer);
    write_leaves(pool, g, ids, num_ids, layer, leaves);
    mp_publish(page, step, layers_done);
    if (eventfd >= 0 && mp_ring(eventfd) != 0)
        fail(result, MP_SYSTEM, 0);
}

static int check_copy(int64_t source_bytes, int64_t target_bytes, const int64_t *spans,
                      int64_t num_spans, const mp_geometry *g, const mp_leaf *leaves,
                      int64_t num_leaves, mp_result *result)
{
    *result = (mp_result){MP_OK, 0, 0};
    for (int64_t i = 0; i < num_spans; i++) {
        const int64_t from = spans[3 * i], to = spans[3 * i + 1], length = spans[3 * i + 2];
        if (from < 0 || to < 0 || length < 0 || length > source_bytes || length > target_bytes ||
            from > source_bytes - length || to > target_bytes - length)
            return fail(result, MP_SPAN_OUT_OF_BOUNDS, i);
    }
    if (num_leaves == 0)
        return 1;
    if (!mp_geometry_is_valid(g) || g->region_bytes > target_bytes)
        return fail(result, MP_BAD_GEOMETRY, 0);
    int64_t previous = -1;
    for (int64_t i = 0; i < num_leaves; i++) {
        if (leaves[i].block < 0 || leaves[i].block >= g->num_blocks)
            return fail(result, MP_BLOCK_OUT_OF_BOUNDS, i);
        if (leaves[i].layer < 0 || leaves[i].layer >= g->num_layers)
            return fail(result, MP_LAYER_OUT_OF_BOUNDS, i);
        if (num_spans > 0) {
            if (leaves[i].after_span < previous || leaves[i].after_span >= num_spans)
                return fail(result, MP_LEAF_ORDER, i);
            previous = leaves[i].after_span;
        }
    }
    return 1;
}

/*
 * Copy spans (int64[num_spans, 3]: source offset, target offset, length), and check each leaf as soon
 * as its last byte is there, while it is in the cache. Leaves are in order of `after_span`. A long
 * span is copied up to each leaf's end in turn, so that no leaf is read back from memory; a leaf that is one run of
 * it is digested as it is copied.
 */
void mp_copy_verify(const uint8_t *source, int64_t source_bytes, uint8_t *target,
                              int64_t target_bytes, const int64_t *spans, int64_t num_spans,
                              const mp_geometry *g, const mp_leaf *leaves, int64_t num_leaves,
                              uint8_t *is_bad, mp_result *result)
{
    if (!check_copy(source_bytes, target_bytes, spans, num_spans, g, leaves, num_leaves, result))
        return;
    int64_t leaf = 0;
    for (int64_t i = -1; i < num_spans; i++) {
        const int64_t from = i < 0 ? 0 : spans[3 * i], to = i < 0 ? 0 : spans[3 * i + 1];
        const int64_t length = i < 0 ? 0 : spans[3 * i + 2];
        int64_t done = 0;
        while (leaf < num_leaves && (num_spans == 0 || leaves[leaf].after_span == i)) {
            const int64_t leaf_end = mp_leaf_end(g, leaves[leaf].block, leaves[leaf].layer);
            const int64_t upto = leaf_end - to < length ? leaf_end - to : length;
            const uint8_t *rest = source + from + done;
            uint64_t digest;
            if (mp_leaf_is_one_run(g) && upto - done == g->num_planes * g->plane_bytes &&
                to + upto == leaf_end) {
                digest = mp_copy_leaf(target + to + done, rest, upto - done);
            } else {
                if (upto > done)
                    mp_copy(target + to + done, rest, upto - done);
                digest = digest_of(target, g, leaves[leaf].block, leaves[leaf].layer);
            }
            done = upto > done ? upto : done;
            is_bad[leaf] = digest != leaves[leaf].expected;
            result->num_bad += is_bad[leaf];
            leaf++;
        }
        if (length > done)
            mp_copy(target + to + done, source + from + done, length - done);
    }
    mp_copied_out();
}
