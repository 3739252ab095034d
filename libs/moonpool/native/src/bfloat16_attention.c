/*
 * Attention over a paged pool of bfloat16 with products of bfloat16 (AVX512-BF16), for rows of one query and
 * for chunks alike. Queries and the weights of the softmax are rounded to bfloat16; every sum is float32.
 *
 * One KV head of one row at a time, with the query heads that share it:
 *
 *   1. its keys and values, packed for the instruction, which adds two products to each lane: of a key 16
 *      tokens' pairs of dimensions lie side by side, of a value 16 dimensions of a pair of tokens
 *   2. a tile of lines (a line: one query token of one head); for each tile SEGMENT tokens after another:
 *      scores, their exponentials beside the largest score so far, and the weighted values, added to what
 *      the segments before gave, scaled to the new largest score
 *
 * What is asked by one tile of lines, as in decoding, is packed a step before it is used, and never lies
 * in memory as a whole; with more tiles, keys and values are packed once for all of them.
 *
 * Segments begin at multiples of SEGMENT of the sequence, pairs of tokens at even ones, and a line adds what
 * it sees and no more. So its result is the same bits alone and in any chunk.
 */
#include "attention.h"

#if defined(__AVX512BF16__)

#include <float.h>
#include <string.h>

enum {
    TILE_LINES = 24,
    SEGMENT = 256, /* tokens under one largest score */
    STEP = 64,     /* tokens whose keys, or values, are used at once */
    GROUP = 16,    /* tokens that are packed at once: lanes */
    STEP_GROUPS = STEP / GROUP,
    MAX_LINES = 6,   /* at once */
    MAX_VECTORS = 4, /* of weighted values at once */
};

typedef int32_t stored_pair __attribute__((aligned(2), may_alias));

/* One KV head of one row. */
typedef struct {
    const mp_attention *attention;
    const uint8_t *keys; /* of block 0: this layer and head */
    const uint8_t *values;
    const int32_t *blocks;
    int64_t length; /* tokens */
} head;

/* Some lines of one KV head, and the memory to work on them in. */
typedef struct {
    int64_t head_dim;
    int64_t num_lines;
    int64_t num_seen[TILE_LINES]; /* tokens, never less than those of the line before */
    float largest[TILE_LINES];    /* score so far */
    uint16_t *query;              /* bfloat16[TILE_LINES, head_dim] */
    uint16_t *weights;            /* bfloat16[TILE_LINES, SEGMENT] */
    float *scores;                /* float[TILE_LINES, SEGMENT] */
    float *totals;                /* float[TILE_LINES, LANES]: of weights so far, lane by lane */
    float *sums;                  /* float[TILE_LINES, head_dim]: of weighted values so far */
    uint8_t *keys;                /* packed: of a step, or of all tokens if `is_packed` */
    uint8_t *values;
    int has_room; /* for all of a row's */
    int is_packed;
} tile;

/* Floats of packed keys, or values, of whole steps. */
static inline int64_t run_floats(const mp_attention *a, int64_t num_tokens)
{
    return (num_tokens + STEP - 1) / STEP * STEP * a->head_dim / 2;
}

static inline int64_t line_floats(const mp_attention *a)
{
    return a->head_dim / 2 + SEGMENT / 2 + SEGMENT + LANES + a->head_dim;
}

MP_INLINE __m512bh broadcast_pair(const uint16_t *at)
{
    return (__m512bh)_mm512_set1_epi32(*(const stored_pair *)at);
}

/* -- packing -- */

/* 16 bytes of each fourth row. */
MP_INLINE __m512i fourths(const uint8_t *at, int64_t stride)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const __m128i *)(at + 4 * stride)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const __m128i *)(at + 8 * stride)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000,
                                       _mm_loadu_si128((const __m128i *)(at + 12 * stride)));
}

/* 4 pairs of dimensions of a group's keys: to[pair][token]. */
MP_INLINE void turn(const uint8_t *at, int64_t stride, uint8_t *to)
{
    const __m512i a = fourths(at, stride), b = fourths(at + stride, stride);
    const __m512i c = fourths(at + 2 * stride, stride), d = fourths(at + 3 * stride, stride);
    const __m512i low_ab = _mm512_unpacklo_epi32(a, b), low_cd = _mm512_unpacklo_epi32(c, d);
    const __m512i high_ab = _mm512_unpackhi_epi32(a, b), high_cd = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(low_ab, low_cd));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi64(low_ab, low_cd));
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi64(high_ab, high_cd));
    _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi64(high_ab, high_cd));
}

/* 16 dimensions of a group's values: to[pair of tokens][dimension], the former `to_stride` bytes apart. */
MP_INLINE void interleave(const uint8_t *at, int64_t stride, uint8_t *to, int64_t to_stride)
{
    const __m512i places = _mm512_add_epi32(
        _mm512_set1_epi32(16 << 16),
        _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                           _mm512_set1_epi32(0x10001)));
    MP_UNROLL
    for (int i = 0; i < GROUP / 2; i++) {
        const uint8_t *even = at + 2 * i * stride, *odd = even + stride;
        __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)even));
        v = _mm512_mask_broadcast_i64x4(v, 0xf0, _mm256_loadu_si256((const __m256i *)odd));
        _mm512_storeu_si512(to + i * to_stride, _mm512_permutexvar_epi16(places, v));
    }
}

/* Blocks are scattered: without being told, the processor would wait for the first bytes of each. */
MP_INLINE void fetch(const uint8_t *at, int64_t num_bytes)
{
    for (int64_t i = 0; i < num_bytes; i += 64)
        __builtin_prefetch(at + i);
}

/* Fetches a group that will be packed later, if there is one. */
MP_INLINE void fetch_group(const head *h, const uint8_t *plane, int64_t first)
{
    const mp_geometry *g = &h->attention->geometry;
    if (first >= h->length)
        return;
    const int64_t at = h->blocks[first / g->block_size] * g->block_stride;
    fetch(plane + at + first % g->block_size * g->token_bytes, GROUP * g->token_bytes);
}

/* Tokens [first, first + GROUP) of a plane. In place of those behind the last one lies the last one. */
MP_INLINE void pack_group(const head *h, const uint8_t *plane, int64_t first, int is_values,
                          uint8_t *to)
{
    const mp_geometry *g = &h->attention->geometry;
    const int64_t token_bytes = g->token_bytes;
    int64_t block = first / g->block_size, slot = first % g->block_size;
    const uint8_t *rows = plane + h->blocks[block] * g->block_stride + slot * token_bytes;
    const int is_whole = slot + GROUP <= g->block_size && first + GROUP <= h->length;
    const uint8_t *row[GROUP];
    if (!is_whole)
        for (int i = 0; i < GROUP; i++) {
            row[i] = plane + h->blocks[block] * g->block_stride + slot * token_bytes;
            if (first + i + 1 < h->length && ++slot == g->block_size) {
                slot = 0;
                block++;
            }
        }
    for (int64_t at = 0; at < token_bytes; at += 32) {
        uint8_t gathered[GROUP][32];
        const uint8_t *from = rows + at;
        int64_t stride = token_bytes;
        if (!is_whole) {
            for (int i = 0; i < GROUP; i++)
                memcpy(gathered[i], row[i] + at, 32);
            from = gathered[0];
            stride = 32;
        }
        if (is_values) {
            interleave(from, stride, to + 2 * at, 2 * token_bytes);
        } else {
            turn(from, stride, to + GROUP * at);
            turn(from + 16, stride, to + GROUP * (at + 16));
        }
    }
}

static void pack_all(const head *h, uint8_t *keys, uint8_t *values)
{
    for (int64_t first = 0; first < h->length; first += GROUP) {
        const int64_t at = first * h->attention->geometry.token_bytes;
        fetch_group(h, h->keys, first + 4 * GROUP);
        fetch_group(h, h->values, first + 4 * GROUP);
        pack_group(h, h->keys, first, 0, keys + at);
        pack_group(h, h->values, first, 1, values + at);
    }
}

/* Keys of tokens [first, end), at most a step, and word that their values and later keys are wanted. */
static const uint8_t *keys_of(const tile *tile, const head *h, int64_t first, int64_t end)
{
    const int64_t token_bytes = h->attention->geometry.token_bytes;
    if (tile->is_packed)
        return tile->keys + first * token_bytes;
    for (int64_t at = first; at < end; at += GROUP) {
        fetch_group(h, h->values, at);
        pack_group(h, h->keys, at, 0, tile->keys + (at - first) * token_bytes);
    }
    return tile->keys;
}

static const uint8_t *values_of(const tile *tile, const head *h, int64_t first, int64_t end)
{
    const int64_t token_bytes = h->attention->geometry.token_bytes;
    if (tile->is_packed)
        return tile->values + first * token_bytes;
    for (int64_t at = first; at < end; at += GROUP) {
        fetch_group(h, h->keys, at + SEGMENT);
        pack_group(h, h->values, at, 1, tile->values + (at - first) * token_bytes);
    }
    return tile->values;
}

/* -- scores -- */

/* `num_lines` lines from `line` on, a step's tokens, of which the first is `token` of the segment. */
MP_INLINE void score(const tile *tile, int num_lines, int64_t line, int64_t token,
                     const uint8_t *keys)
{
    const int64_t head_dim = tile->head_dim, group_bytes = GROUP * 2 * head_dim;
    const uint16_t *query = tile->query + line * head_dim;
    __m512 sum[MAX_LINES][STEP_GROUPS];
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int g = 0; g < STEP_GROUPS; g++)
            sum[l][g] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < head_dim; d += 2) {
        __m512bh key[STEP_GROUPS];
        MP_UNROLL
        for (int g = 0; g < STEP_GROUPS; g++)
            key[g] = (__m512bh)_mm512_loadu_si512(keys + g * group_bytes + d * 32);
        MP_UNROLL
        for (int l = 0; l < num_lines; l++) {
            const __m512bh q = broadcast_pair(query + l * head_dim + d);
            MP_UNROLL
            for (int g = 0; g < STEP_GROUPS; g++)
                sum[l][g] = _mm512_dpbf16_ps(sum[l][g], q, key[g]);
        }
    }
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int g = 0; g < STEP_GROUPS; g++)
            _mm512_storeu_ps(tile->scores + (line + l) * SEGMENT + token + g * GROUP, sum[l][g]);
    }
}

/* Each apart from the loops around it, so that its sums stay in registers. */
#define SCORE(num_lines)                                                                          \
    static __attribute__((noinline)) void score_##num_lines(                                      \
        const tile *tile, int64_t line, int64_t token, const uint8_t *keys)                       \
    {                                                                                             \
        score(tile, num_lines, line, token, keys);                                                \
    }

SCORE(1)
SCORE(2)
SCORE(3)
SCORE(6)

/* How many of `num_left` lines are taken at once. */
static inline int64_t lines_at_once(int64_t num_left)
{
    return num_left >= 6 ? 6 : num_left >= 3 ? 3 : num_left;
}

static void score_step(const tile *tile, int64_t token, const uint8_t *keys)
{
    for (int64_t line = 0; line < tile->num_lines;) {
        const int64_t count = lines_at_once(tile->num_lines - line);
        switch (count) {
        case 1: score_1(tile, line, token, keys); break;
        case 2: score_2(tile, line, token, keys); break;
        case 3: score_3(tile, line, token, keys); break;
        default: score_6(tile, line, token, keys); break;
        }
        line += count;
    }
}

/* -- softmax -- */

/* 2^x within 3e-6 of it, 1 for 0: a polynomial fitted to [-1/2, 1/2]. */
MP_INLINE __m512 power_of_two(__m512 x)
{
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.5828520e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5906426e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312418e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/*
 * A line's weights for the first `num_tokens` of a segment, of which there is one: exponentials of its scores
 * beside the largest so far. What the segments before gave is scaled to that one.
 */
static void soften_segment(tile *tile, int64_t line, int64_t num_tokens, float factor)
{
    float *scores = tile->scores + line * SEGMENT, *totals = tile->totals + line * LANES;
    float *sums = tile->sums + line * tile->head_dim;
    uint16_t *weights = tile->weights + line * SEGMENT;
    const int64_t end = (num_tokens + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    for (int64_t t = num_tokens; t < end; t++)
        scores[t] = -FLT_MAX;
    __m512 largest[2] = {_mm512_set1_ps(tile->largest[line]), _mm512_loadu_ps(scores)};
    for (int64_t t = 0; t < end; t += 2 * LANES)
        for (int i = 0; i < 2; i++)
            largest[i] = _mm512_max_ps(largest[i], _mm512_loadu_ps(scores + t + i * LANES));
    const float top = largest_of_lanes((floats)_mm512_max_ps(largest[0], largest[1]));
    const __m512 by = _mm512_set1_ps(factor), offset = _mm512_set1_ps(top * factor);
    const __m512 shrunk =
        power_of_two(_mm512_set1_ps((tile->largest[line] - top) * factor));
    tile->largest[line] = top;
    __m512 total[2] = {_mm512_mul_ps(_mm512_loadu_ps(totals), shrunk), _mm512_setzero_ps()};
    for (int64_t t = 0; t < end; t += 2 * LANES) {
        __m512 weight[2];
        MP_UNROLL
        for (int i = 0; i < 2; i++) {
            const __m512 score = _mm512_loadu_ps(scores + t + i * LANES);
            weight[i] = power_of_two(_mm512_fmsub_ps(score, by, offset));
            total[i] = _mm512_add_ps(total[i], weight[i]);
        }
        _mm512_storeu_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
    }
    _mm512_storeu_ps(totals, _mm512_add_ps(total[0], total[1]));
    for (int64_t d = 0; d < tile->head_dim; d += LANES)
        _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), shrunk));
}

/* -- weighted values -- */

/*
 * `num_lines` lines from `line` on, dims of `num_vectors` vectors from `dim` on, pairs [first, end) of a step
 * that begins at `token` of the segment; of the first token of each pair only if `is_half`.
 */
MP_INLINE void mix(const tile *tile, int num_lines, int num_vectors, int is_half, int64_t line,
                   int64_t dim, int64_t token, int64_t first, int64_t end, const uint8_t *values)
{
    const int64_t head_dim = tile->head_dim;
    const uint16_t *weights = tile->weights + line * SEGMENT + token;
    float *sums = tile->sums + line * head_dim + dim;
    __m512 sum[MAX_LINES][MAX_VECTORS];
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            sum[l][v] = _mm512_loadu_ps(sums + l * head_dim + v * LANES);
    }
    for (int64_t pair = first; pair < end; pair++) {
        const uint8_t *from = values + (pair * head_dim + dim) * 4;
        __m512bh value[MAX_VECTORS];
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++) {
            const __m512i both = _mm512_loadu_si512(from + v * 64);
            value[v] = (__m512bh)(is_half ? _mm512_and_si512(both, _mm512_set1_epi32(0xffff)) : both);
        }
        MP_UNROLL
        for (int l = 0; l < num_lines; l++) {
            const __m512bh weight = broadcast_pair(weights + l * SEGMENT + 2 * pair);
            MP_UNROLL
            for (int v = 0; v < num_vectors; v++)
                sum[l][v] = _mm512_dpbf16_ps(sum[l][v], weight, value[v]);
        }
    }
    MP_UNROLL
    for (int l = 0; l < num_lines; l++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            _mm512_storeu_ps(sums + l * head_dim + v * LANES, sum[l][v]);
    }
}

MP_INLINE void mix_dims(const tile *tile, int num_lines, int is_half, int64_t line, int64_t token,
                        int64_t first, int64_t end, const uint8_t *values)
{
    int64_t dim = 0;
    for (; dim + MAX_VECTORS * LANES <= tile->head_dim; dim += MAX_VECTORS * LANES)
        mix(tile, num_lines, MAX_VECTORS, is_half, line, dim, token, first, end, values);
    for (; dim < tile->head_dim; dim += LANES)
        mix(tile, num_lines, 1, is_half, line, dim, token, first, end, values);
}

#define MIX(name, num_lines, is_half)                                                          \
    static __attribute__((noinline)) void name(const tile *tile, int64_t line, int64_t token,  \
                                               int64_t first, int64_t end,                     \
                                               const uint8_t *values)                          \
    {                                                                                          \
        mix_dims(tile, num_lines, is_half, line, token, first, end, values);                   \
    }

MIX(mix_half, 1, 1)
MIX(mix_1, 1, 0)
MIX(mix_2, 2, 0)
MIX(mix_3, 3, 0)
MIX(mix_6, 6, 0)

/* A step of tokens of which the lines see different numbers, `num_seen` of them from `token` on. */
static int64_t seen_of(const tile *tile, int64_t line, int64_t step_begin)
{
    const int64_t seen = tile->num_seen[line] - step_begin;
    return seen < 0 ? 0 : seen < STEP ? seen : STEP;
}

/* The step begins at `begin` of the sequence, and `token` of the segment. */
static void mix_step(const tile *tile, int64_t begin, int64_t token, const uint8_t *values)
{
    for (int64_t line = 0; line < tile->num_lines;) {
        const int64_t count = lines_at_once(tile->num_lines - line);
        const int64_t shared = seen_of(tile, line, begin) / 2; /* pairs: what the first sees */
        switch (count) {
        case 1: mix_1(tile, line, token, 0, shared, values); break;
        case 2: mix_2(tile, line, token, 0, shared, values); break;
        case 3: mix_3(tile, line, token, 0, shared, values); break;
        default: mix_6(tile, line, token, 0, shared, values); break;
        }
        for (const int64_t last = line + count; line < last; line++) {
            const int64_t seen = seen_of(tile, line, begin);
            if (shared < seen / 2)
                mix_1(tile, line, token, shared, seen / 2, values);
            if (seen % 2)
                mix_half(tile, line, token, seen / 2, seen / 2 + 1, values);
        }
    }
}

/* -- tiles -- */

static void attend_tile(tile *tile, const head *h, float factor)
{
    const int64_t num_tokens = tile->num_seen[tile->num_lines - 1];
    memset(tile->sums, 0, sizeof(float) * (size_t)(tile->num_lines * tile->head_dim));
    memset(tile->totals, 0, sizeof(float) * (size_t)(tile->num_lines * LANES));
    for (int64_t line = 0; line < tile->num_lines; line++)
        tile->largest[line] = -FLT_MAX;
    for (int64_t segment = 0; segment < num_tokens; segment += SEGMENT) {
        const int64_t left = num_tokens - segment, count = left < SEGMENT ? left : SEGMENT;
        for (int64_t token = 0; token < count; token += STEP) {
            const int64_t end = token + STEP < count ? token + STEP : count;
            score_step(tile, token, keys_of(tile, h, segment + token, segment + end));
        }
        for (int64_t line = 0; line < tile->num_lines; line++) {
            const int64_t seen = tile->num_seen[line] - segment;
            if (seen > 0)
                soften_segment(tile, line, seen < SEGMENT ? seen : SEGMENT, factor);
        }
        for (int64_t token = 0; token < count; token += STEP) {
            const int64_t end = token + STEP < count ? token + STEP : count;
            mix_step(tile, segment + token, token,
                     values_of(tile, h, segment + token, segment + end));
        }
    }
}

/* The last `num_queries` tokens of one row and KV head; `query` and `out` are of the first of them. */
static void attend_head(tile *tile, const head *h, int64_t num_queries, const float *query,
                        int64_t query_stride, float *out, int64_t out_stride)
{
    const mp_attention *a = h->attention;
    const int64_t head_dim = a->head_dim, group_size = a->group_size;
    const int64_t num_lines = num_queries * group_size;
    const float factor = a->scale * 1.44269504088896341f; /* exponentials are powers of two */
    tile->is_packed = tile->has_room && num_lines > TILE_LINES;
    if (tile->is_packed)
        pack_all(h, tile->keys, tile->values);
    for (int64_t first = 0; first < num_lines; first += TILE_LINES) {
        float *to[TILE_LINES];
        tile->num_lines = num_lines - first < TILE_LINES ? num_lines - first : TILE_LINES;
        for (int64_t line = 0; line < tile->num_lines; line++) {
            const int64_t token = (first + line) / group_size, one = (first + line) % group_size;
            const float *from = query + token * query_stride + one * head_dim;
            for (int64_t d = 0; d < head_dim; d += LANES)
                _mm256_storeu_si256((__m256i *)(tile->query + line * head_dim + d),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + d)));
            to[line] = out + token * out_stride + one * head_dim;
            tile->num_seen[line] = h->length - num_queries + token + 1;
        }
        attend_tile(tile, h, factor);
        for (int64_t line = 0; line < tile->num_lines; line++) {
            const float total =
                sum_of_lanes((floats)_mm512_loadu_ps(tile->totals + line * LANES));
            for (int64_t d = 0; d < head_dim; d += LANES)
                *(stored_floats *)(to[line] + d) =
                    *(const stored_floats *)(tile->sums + line * head_dim + d) / total;
        }
    }
}

MP_INLINE void attend(const mp_attention *a, int64_t layer, const mp_attention_rows *rows,
                      const float *query, int64_t query_stride, float *out, int is_last_only,
                      mp_result *result)
{
    if (!rows_are_valid(a, layer, rows, result))
        return;
    const mp_geometry *g = &a->geometry;
    const int64_t head_bytes = g->block_size * g->token_bytes;
    const int64_t num_kv_heads = g->plane_bytes / head_bytes;
    const int64_t group_floats = a->group_size * a->head_dim;
    float *work = (float *)(((uintptr_t)rows->work + 63) & ~(uintptr_t)63);
    tile tile = {.head_dim = a->head_dim, .has_room = !is_last_only};
    tile.scores = work;
    tile.weights = (uint16_t *)(tile.scores + TILE_LINES * SEGMENT);
    tile.totals = (float *)(tile.weights + TILE_LINES * SEGMENT);
    tile.sums = tile.totals + TILE_LINES * LANES;
    tile.query = (uint16_t *)(tile.sums + TILE_LINES * a->head_dim);
    tile.keys = (uint8_t *)(tile.query + TILE_LINES * a->head_dim);
    tile.values = tile.keys + 4 * run_floats(a, is_last_only ? STEP : rows->max_length);
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const int64_t end = rows->qo_indptr[row + 1];
        const int64_t begin = is_last_only ? end - 1 : rows->qo_indptr[row];
        for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            const uint8_t *keys = a->pool + mp_leaf_offset(g, 0, layer) + kv_head * head_bytes;
            const head h = {a, keys, keys + g->plane_stride, rows->indices + rows->indptr[row],
                            rows->lengths[row]};
            attend_head(&tile, &h, end - begin, query + begin * query_stride + kv_head * group_floats,
                        query_stride, out + (begin * num_kv_heads + kv_head) * group_floats,
                        num_kv_heads * group_floats);
        }
    }
}

#define EXPORT_ATTEND(name, is_last_only)                                                        \
    MP_EXPORT void name(const mp_attention *, int64_t, const mp_attention_rows *, const float *, \
                        int64_t, float *, mp_result *);                                          \
    void name(const mp_attention *a, int64_t layer, const mp_attention_rows *rows,               \
              const float *query, int64_t query_stride, float *out, mp_result *result)           \
    {                                                                                            \
        attend(a, layer, rows, query, query_stride, out, is_last_only, result);                  \
    }

EXPORT_ATTEND(mp_attend_bfloat16, 1)
EXPORT_ATTEND(mp_attend_chunks_bfloat16, 0)

/* Floats that they work in. */
MP_EXPORT int64_t mp_attend_work_bfloat16(const mp_attention *, int64_t);
MP_EXPORT int64_t mp_attend_chunks_work_bfloat16(const mp_attention *, int64_t);

int64_t mp_attend_work_bfloat16(const mp_attention *a, int64_t max_length)
{
    (void)max_length;
    return LANES + TILE_LINES * line_floats(a) + 2 * run_floats(a, STEP);
}

int64_t mp_attend_chunks_work_bfloat16(const mp_attention *a, int64_t max_length)
{
    return LANES + TILE_LINES * line_floats(a) + 2 * run_floats(a, max_length);
}

#endif
