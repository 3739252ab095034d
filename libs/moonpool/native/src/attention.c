/*
 * Attention of the last query of each row (decode) over the paged pool, straight from its blocks: nothing
 * is gathered, and every key and value is read once. Compiled once per instruction set (vectors.h).
 *
 * One KV head of one row at a time, with the query heads that share it:
 *
 *   1. scores[query][token] = query . key * scale, block after block
 *   2. the exponentials of (score - largest score), and their sum
 *   3. out[query][dim] = sum over tokens of exponential * value[token][dim], over that sum
 *
 * All arithmetic is float32, whatever the pool holds. A row's result depends on its own query, keys and
 * values only, not on the other rows of the batch.
 */
#include "attention.h"

enum {
    MAX_QUERIES = MP_ATTEND_QUERIES, /* query heads at once */
    MAX_TOKENS = 4,                  /* keys at once */
    MAX_VECTORS = 4,                 /* vectors of a value at once */
    AHEAD = 4,                       /* blocks whose keys are fetched before they are used */
};

/* What one KV head of one row needs. */
typedef struct {
    const mp_attention *attention;
    const uint8_t *keys; /* of block 0: this layer and head */
    const uint8_t *values;
    const int32_t *blocks;
    int64_t length; /* tokens */
} head;

/*
 * Blocks are scattered: without being told, the processor would wait for the first bytes of each. To the second
 * cache, to which more lines may be on their way at once than to the first.
 */
MP_INLINE void fetch(const uint8_t *at, int64_t num_bytes)
{
    for (int64_t i = 0; i < num_bytes; i += 64)
        __builtin_prefetch(at + i, 0, 2);
}

/* scores[q][t] for `num_tokens` keys from `key` on. */
MP_INLINE void score(int is_bfloat16, int num_queries, int num_tokens, int64_t head_dim,
                     const float *query, const uint8_t *key, float scale, float *scores,
                     int64_t stride)
{
    floats sum[MAX_QUERIES][MAX_TOKENS];
    MP_UNROLL
    for (int q = 0; q < num_queries; q++) {
        MP_UNROLL
        for (int t = 0; t < num_tokens; t++)
            sum[q][t] = (floats){0};
    }
    for (int64_t d = 0; d < head_dim; d += LANES) {
        MP_UNROLL
        for (int t = 0; t < num_tokens; t++) {
            const floats k = load(key, is_bfloat16, t * head_dim + d);
            MP_UNROLL
            for (int q = 0; q < num_queries; q++)
                sum[q][t] += k * *(const stored_floats *)(query + q * head_dim + d);
        }
    }
    MP_UNROLL
    for (int q = 0; q < num_queries; q++) {
        if (num_tokens == MAX_TOKENS) {
            *(stored_four *)(scores + q * stride) = sums_of_lanes(sum[q]) * scale;
            continue;
        }
        MP_UNROLL
        for (int t = 0; t < num_tokens; t++)
            scores[q * stride + t] = sum_of_lanes(sum[q][t]) * scale;
    }
}

MP_INLINE void score_all(const head *h, int is_bfloat16, int num_queries, const float *query,
                         float *scores, int64_t stride)
{
    const mp_geometry *g = &h->attention->geometry;
    const int64_t head_dim = h->attention->head_dim;
    const float scale = h->attention->scale;
    const int64_t num_blocks = (h->length + g->block_size - 1) / g->block_size;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = block * g->block_size, left = h->length - first;
        const int64_t count = left < g->block_size ? left : g->block_size;
        const int64_t at = h->blocks[block] * g->block_stride;
        const int64_t later = block + AHEAD < num_blocks ? block + AHEAD : num_blocks - 1;
        const uint8_t *key = h->keys + at, *value = h->values + at;
        const uint8_t *next_key = h->keys + h->blocks[later] * g->block_stride;
        int64_t t = 0;
        for (; t + MAX_TOKENS <= count; t += MAX_TOKENS) {
            fetch(next_key + t * g->token_bytes, MAX_TOKENS * g->token_bytes);
            fetch(value + t * g->token_bytes, MAX_TOKENS * g->token_bytes);
            score(is_bfloat16, num_queries, MAX_TOKENS, head_dim, query, key + t * g->token_bytes,
                  scale, scores + first + t, stride);
        }
        for (; t < count; t++)
            score(is_bfloat16, num_queries, 1, head_dim, query, key + t * g->token_bytes, scale,
                  scores + first + t, stride);
    }
}

/* out[q][dims of `num_vectors` vectors] from `dim` on. */
MP_INLINE void mix(const head *h, int is_bfloat16, int num_queries, int num_vectors, int64_t dim,
                   const float *weights, int64_t stride, const float *sums, float *out)
{
    const mp_geometry *g = &h->attention->geometry;
    const int64_t head_dim = h->attention->head_dim;
    floats sum[MAX_QUERIES][MAX_VECTORS];
    MP_UNROLL
    for (int q = 0; q < num_queries; q++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            sum[q][v] = (floats){0};
    }
    for (int64_t first = 0; first < h->length; first += g->block_size) {
        const uint8_t *value = h->values + h->blocks[first / g->block_size] * g->block_stride;
        const int64_t left = h->length - first;
        const int64_t count = left < g->block_size ? left : g->block_size;
        for (int64_t t = 0; t < count; t++) {
            MP_UNROLL
            for (int v = 0; v < num_vectors; v++) {
                const floats x = load(value, is_bfloat16, t * head_dim + dim + v * LANES);
                MP_UNROLL
                for (int q = 0; q < num_queries; q++)
                    sum[q][v] += x * weights[q * stride + first + t];
            }
        }
    }
    MP_UNROLL
    for (int q = 0; q < num_queries; q++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            *(stored_floats *)(out + q * head_dim + dim + v * LANES) = sum[q][v] / sums[q];
    }
}

/* Query heads [0, num_queries) of one KV head. */
MP_INLINE void attend_head(const head *h, int is_bfloat16, int num_queries, const float *query,
                           float *scores, int64_t stride, float *out)
{
    const int64_t num_vectors = h->attention->head_dim / LANES;
    score_all(h, is_bfloat16, num_queries, query, scores, stride);
    float sums[MAX_QUERIES];
    for (int q = 0; q < num_queries; q++)
        sums[q] = soften(scores + q * stride, h->length);
    int64_t v = 0;
    for (; v + MAX_VECTORS <= num_vectors; v += MAX_VECTORS)
        mix(h, is_bfloat16, num_queries, MAX_VECTORS, v * LANES, scores, stride, sums, out);
    for (; v < num_vectors; v++)
        mix(h, is_bfloat16, num_queries, 1, v * LANES, scores, stride, sums, out);
}

MP_INLINE void attend_group(const head *h, int is_bfloat16, const float *query,
                            const mp_attention_rows *rows, float *out)
{
    const int64_t head_dim = h->attention->head_dim, group_size = h->attention->group_size;
    const int64_t stride = rows->max_length;
    float *scores = rows->work;
    for (int64_t q = 0; q < group_size; q += MAX_QUERIES) {
        const float *from = query + q * head_dim;
        float *to = out + q * head_dim;
        switch (group_size - q) {
        case 1: attend_head(h, is_bfloat16, 1, from, scores, stride, to); break;
        case 2: attend_head(h, is_bfloat16, 2, from, scores, stride, to); break;
        default: attend_head(h, is_bfloat16, MAX_QUERIES, from, scores, stride, to); break;
        }
    }
}

MP_EXPORT void MP_JOIN(mp_attend_, MP_ISA)(const mp_attention *, int64_t, const mp_attention_rows *,
                                           const float *, int64_t, float *, mp_result *);

void MP_JOIN(mp_attend_, MP_ISA)(const mp_attention *a, int64_t layer, const mp_attention_rows *rows,
                                 const float *query, int64_t query_stride, float *out,
                                 mp_result *result)
{
    if (!rows_are_valid(a, layer, rows, result))
        return;
    const mp_geometry *g = &a->geometry;
    const int64_t head_bytes = g->block_size * g->token_bytes;
    const int64_t num_kv_heads = g->plane_bytes / head_bytes;
    const int64_t group_floats = a->group_size * a->head_dim;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            const uint8_t *keys = a->pool + mp_leaf_offset(g, 0, layer) + kv_head * head_bytes;
            const head h = {a, keys, keys + g->plane_stride, rows->indices + rows->indptr[row],
                            rows->lengths[row]};
            const int64_t last = (int64_t)rows->qo_indptr[row + 1] - 1;
            const float *from = query + last * query_stride + kv_head * group_floats;
            float *to = out + (last * num_kv_heads + kv_head) * group_floats;
            if (a->is_bfloat16)
                attend_group(&h, 1, from, rows, to);
            else
                attend_group(&h, 0, from, rows, to);
        }
    }
}
