/*
 * Attention of prefill chunks over the paged pool: causal, with any cached prefix before the chunk.
 * Compiled once per instruction set (vectors.h).
 *
 * One KV head of one row at a time, with the query heads that share it:
 *
 *   1. its keys and values, out of their blocks and as float32, in one run each
 *   2. a tile of lines (a line: one query token of one head), and for each tile what attention.c does:
 *      scores[line][token], the exponentials and their sums, out[line]
 *
 * A tile goes through the keys, and then the values, TILE_TOKENS at a time, which stay in the first
 * cache meanwhile.
 *
 * Every sum is made in the order of attention.c, over what the line sees and no more. So a token's result
 * is the same bits as if it came alone, whatever the chunk, however much before it was cached, and even if
 * what comes after it is not finite.
 */
#include "attention.h"

#include <string.h>

enum {
    TILE_LINES = MP_CHUNK_LINES,
    TILE_TOKENS = 64,
    SCORE_LINES = 2, /* at once, of SCORE_TOKENS keys */
    SCORE_TOKENS = MP_CHUNK_TOKENS,
    MIX_LINES = 3, /* at once, of MIX_VECTORS vectors of a value */
    MIX_VECTORS = 4,
};

/* Some lines of one KV head of one row. */
typedef struct {
    int64_t head_dim;
    float scale;
    const float *keys; /* float[length, head_dim], and room for SCORE_TOKENS */
    const float *values;
    int64_t num_lines;
    int64_t num_seen[TILE_LINES]; /* tokens, never less than those of the line before */
    float *query;                 /* float[TILE_LINES, head_dim] */
    float *sums;                  /* the same: of weighted values so far */
    float *scores;                /* float[TILE_LINES, stride] */
    int64_t stride;
} tile;

/* `at` is of block 0. */
MP_INLINE void unpack(const mp_geometry *g, const uint8_t *at, const int32_t *blocks, int64_t length,
                      int64_t head_dim, int is_bfloat16, float *to)
{
    for (int64_t first = 0; first < length; first += g->block_size) {
        const uint8_t *from = at + blocks[first / g->block_size] * g->block_stride;
        const int64_t left = length - first;
        const int64_t count = (left < g->block_size ? left : g->block_size) * head_dim;
        for (int64_t i = 0; i < count; i += LANES)
            *(stored_floats *)(to + first * head_dim + i) = load(from, is_bfloat16, i);
    }
}

/*
 * The sums of the lanes of sum[line][token], in the order of sum_of_lanes, as [line][token]. Two lines at
 * once: a line by itself (sums_of_lanes) made whole chunks 1.03 times as slow.
 */
#if MP_VECTOR_BYTES >= 32

MP_INLINE void store_sums(floats sum[SCORE_LINES][SCORE_TOKENS], float scale, float *scores,
                          int64_t stride)
{
    eight in_four[SCORE_TOKENS]; /* four lanes of each line */
    MP_UNROLL
    for (int t = 0; t < SCORE_TOKENS; t++) {
        const eight a = in_eight(sum[0][t]), b = in_eight(sum[1][t]);
        in_four[t] = MP_PICK_EIGHT(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                     MP_PICK_EIGHT(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    eight in_two[2]; /* two lanes of two tokens of each line */
    MP_UNROLL
    for (int i = 0; i < 2; i++) {
        const eight a = in_four[2 * i], b = in_four[2 * i + 1];
        in_two[i] = MP_PICK_EIGHT(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                    MP_PICK_EIGHT(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    const eight a = in_two[0], b = in_two[1];
    const union { eight whole; four lines[2]; } parts = {
        (MP_PICK_EIGHT(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         MP_PICK_EIGHT(a, b, 1, 3, 9, 11, 5, 7, 13, 15)) *
        scale};
    *(stored_four *)scores = parts.lines[0];
    *(stored_four *)(scores + stride) = parts.lines[1];
}

#else

MP_INLINE void store_sums(floats sum[SCORE_LINES][SCORE_TOKENS], float scale, float *scores,
                          int64_t stride)
{
    MP_UNROLL
    for (int line = 0; line < SCORE_LINES; line++) {
        MP_UNROLL
        for (int t = 0; t < SCORE_TOKENS; t++)
            scores[line * stride + t] = sum_of_lanes(sum[line][t]) * scale;
    }
}

#endif

/* SCORE_LINES lines from `line` on, SCORE_TOKENS tokens from `token` on. */
MP_INLINE void score(const tile *tile, int64_t line, int64_t token)
{
    const int64_t head_dim = tile->head_dim;
    const float *query = tile->query + line * head_dim, *key = tile->keys + token * head_dim;
    floats sum[SCORE_LINES][SCORE_TOKENS];
    MP_UNROLL
    for (int l = 0; l < SCORE_LINES; l++) {
        MP_UNROLL
        for (int t = 0; t < SCORE_TOKENS; t++)
            sum[l][t] = (floats){0};
    }
    for (int64_t d = 0; d < head_dim; d += LANES) {
        MP_UNROLL
        for (int t = 0; t < SCORE_TOKENS; t++) {
            const floats k = *(const stored_floats *)(key + t * head_dim + d);
            MP_UNROLL
            for (int l = 0; l < SCORE_LINES; l++)
                sum[l][t] += k * *(const stored_floats *)(query + l * head_dim + d);
        }
    }
    store_sums(sum, tile->scale, tile->scores + line * tile->stride + token, tile->stride);
}

static void score_tile(const tile *tile, int64_t num_tokens)
{
    for (int64_t first = 0; first < num_tokens; first += TILE_TOKENS) {
        const int64_t end = first + TILE_TOKENS < num_tokens ? first + TILE_TOKENS : num_tokens;
        for (int64_t line = 0; line < tile->num_lines; line += SCORE_LINES)
            for (int64_t token = first; token < end; token += SCORE_TOKENS)
                score(tile, line, token);
    }
}

/* `num_lines` lines from `line` on, dims of `num_vectors` vectors from `dim` on, tokens [first, end). */
MP_INLINE void mix(const tile *tile, int num_lines, int num_vectors, int64_t line, int64_t dim,
                   int64_t first, int64_t end)
{
    const int64_t head_dim = tile->head_dim;
    const float *weights = tile->scores + line * tile->stride;
    float *sums = tile->sums + line * head_dim + dim;
    floats sum[MIX_LINES][MIX_VECTORS];
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            sum[l][v] = *(const stored_floats *)(sums + l * head_dim + v * LANES);
    }
    for (int64_t token = first; token < end; token++) {
        const float *value = tile->values + token * head_dim + dim;
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++) {
            const floats x = *(const stored_floats *)(value + v * LANES);
            MP_UNROLL
            for (int l = 0; l < num_lines; l++)
                sum[l][v] += x * weights[l * tile->stride + token];
        }
    }
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            *(stored_floats *)(sums + l * head_dim + v * LANES) = sum[l][v];
    }
}

MP_INLINE void mix_lines(const tile *tile, int num_lines, int64_t line, int64_t first, int64_t end)
{
    int64_t dim = 0;
    for (; dim + MIX_VECTORS * LANES <= tile->head_dim; dim += MIX_VECTORS * LANES)
        mix(tile, num_lines, MIX_VECTORS, line, dim, first, end);
    for (; dim < tile->head_dim; dim += LANES)
        mix(tile, num_lines, 1, line, dim, first, end);
}

/* Apart from the loops around it, so that its sums stay in registers. */
static __attribute__((noinline)) void mix_all(const tile *tile, int64_t line, int64_t first,
                                              int64_t end)
{
    mix_lines(tile, MIX_LINES, line, first, end);
}

/* What a line sees of tokens [first, end). */
static __attribute__((noinline)) void mix_line(const tile *tile, int64_t line, int64_t first,
                                               int64_t end)
{
    const int64_t seen = tile->num_seen[line] < end ? tile->num_seen[line] : end;
    if (first < seen)
        mix_lines(tile, 1, line, first, seen);
}

static void mix_tile(const tile *tile, int64_t num_tokens)
{
    memset(tile->sums, 0, sizeof(float) * (size_t)(tile->num_lines * tile->head_dim));
    for (int64_t first = 0; first < num_tokens; first += TILE_TOKENS) {
        const int64_t end = first + TILE_TOKENS < num_tokens ? first + TILE_TOKENS : num_tokens;
        int64_t line = 0;
        for (; line + MIX_LINES <= tile->num_lines; line += MIX_LINES) {
            int64_t shared = first; /* what all of them see, which is what the first does */
            if (shared < tile->num_seen[line]) {
                shared = tile->num_seen[line] < end ? tile->num_seen[line] : end;
                mix_all(tile, line, first, shared);
            }
            if (shared < end)
                for (int64_t other = 1; other < MIX_LINES; other++)
                    mix_line(tile, line + other, shared, end);
        }
        for (; line < tile->num_lines; line++)
            mix_line(tile, line, first, end);
    }
}

/* What attention.c does with one line. */
static void attend_tile(const tile *tile, float *const out[])
{
    const int64_t num_tokens = tile->num_seen[tile->num_lines - 1];
    float weights[TILE_LINES];
    score_tile(tile, num_tokens);
    for (int64_t line = 0; line < tile->num_lines; line++) {
        float *scores = tile->scores + line * tile->stride;
        weights[line] = soften(scores, tile->num_seen[line]);
    }
    mix_tile(tile, num_tokens);
    for (int64_t line = 0; line < tile->num_lines; line++)
        for (int64_t d = 0; d < tile->head_dim; d += LANES)
            *(stored_floats *)(out[line] + d) =
                *(const stored_floats *)(tile->sums + line * tile->head_dim + d) / weights[line];
}

/* All queries of one row and the query heads of one KV head; `query` and `out` are of the first. */
static void attend_row(tile *tile, int64_t length, int64_t num_queries, int64_t group_size,
                       const float *query, int64_t query_stride, float *out, int64_t out_stride)
{
    const int64_t head_dim = tile->head_dim, num_lines = num_queries * group_size;
    const int64_t num_cached = length - num_queries;
    for (int64_t first = 0; first < num_lines; first += TILE_LINES) {
        float *to[TILE_LINES];
        tile->num_lines = num_lines - first < TILE_LINES ? num_lines - first : TILE_LINES;
        for (int64_t line = 0; line < tile->num_lines; line++) {
            const int64_t token = (first + line) / group_size, head = (first + line) % group_size;
            memcpy(tile->query + line * head_dim, query + token * query_stride + head * head_dim,
                   sizeof(float) * (size_t)head_dim);
            to[line] = out + token * out_stride + head * head_dim;
            tile->num_seen[line] = num_cached + token + 1;
        }
        attend_tile(tile, to);
    }
}

MP_EXPORT void MP_JOIN(mp_attend_chunks_, MP_ISA)(const mp_attention *, int64_t,
                                                  const mp_attention_rows *, const float *, int64_t,
                                                  float *, mp_result *);

void MP_JOIN(mp_attend_chunks_, MP_ISA)(const mp_attention *a, int64_t layer,
                                        const mp_attention_rows *rows, const float *query,
                                        int64_t query_stride, float *out, mp_result *result)
{
    if (!rows_are_valid(a, layer, rows, result))
        return;
    const mp_geometry *g = &a->geometry;
    const int64_t head_bytes = g->block_size * g->token_bytes;
    const int64_t num_kv_heads = g->plane_bytes / head_bytes;
    const int64_t group_floats = a->group_size * a->head_dim;
    const int64_t run_floats = mp_chunk_run(a, rows->max_length);
    const int64_t line_floats = TILE_LINES * a->head_dim;
    float *keys = rows->work, *values = keys + run_floats, *lines = values + run_floats;
    tile tile = {.head_dim = a->head_dim,
                 .scale = a->scale,
                 .keys = keys,
                 .values = values,
                 .query = lines,
                 .sums = lines + line_floats,
                 .scores = lines + 2 * line_floats,
                 .stride = rows->max_length};
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const int32_t *blocks = rows->indices + rows->indptr[row];
        const int64_t length = rows->lengths[row], begin = rows->qo_indptr[row];
        for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            const uint8_t *at = a->pool + mp_leaf_offset(g, 0, layer) + kv_head * head_bytes;
            if (a->is_bfloat16) {
                unpack(g, at, blocks, length, a->head_dim, 1, keys);
                unpack(g, at + g->plane_stride, blocks, length, a->head_dim, 1, values);
            } else {
                unpack(g, at, blocks, length, a->head_dim, 0, keys);
                unpack(g, at + g->plane_stride, blocks, length, a->head_dim, 0, values);
            }
            attend_row(&tile, length, rows->qo_indptr[row + 1] - begin, a->group_size,
                       query + begin * query_stride + kv_head * group_floats, query_stride,
                       out + (begin * num_kv_heads + kv_head) * group_floats,
                       num_kv_heads * group_floats);
        }
    }
}
