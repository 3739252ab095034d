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

#include "bfloat16_packing.h"

#include <float.h>
#include <string.h>

enum {
    TILE_LINES = 24,
    SEGMENT = 256, /* tokens under one largest score */
    STEP = 64,     /* tokens whose keys, or values, are used at once */
    STEP_GROUPS = STEP / GROUP,
    MAX_LINES = 6,   /* at once */
    MAX_VECTORS = 4, /* of weighted values at once */
};

typedef int32_t stored_pair __attribute__((aligned(2), may_alias));

/* Whose keys are packed next, and from which token on. */
typedef struct {
    const uint8_t *plane;
    const int32_t *blocks;
    int64_t length, first;
} following;

/* Some lines of one KV head, and the memory to work on them in. */
typedef struct {
    int64_t head_dim;
    int64_t num_lines;
    int64_t num_seen[TILE_LINES]; /* tokens, never less than those of the line before */
    float *largest;               /* float[TILE_LINES]: score so far */
    uint16_t *query;              /* bfloat16[TILE_LINES, head_dim] */
    uint16_t *weights;            /* bfloat16[TILE_LINES, SEGMENT] */
    float *scores;                /* float[TILE_LINES, SEGMENT] */
    float *totals;                /* float[TILE_LINES, LANES]: of weights so far, lane by lane */
    float *sums;                  /* float[TILE_LINES, head_dim]: of weighted values so far */
    uint8_t *keys;                /* packed: of a step, or of all tokens if `is_packed` */
    uint8_t *values;
    int is_packed;
} tile;

/* Floats of packed keys, or values, of whole steps. */
static inline int64_t run_floats(const mp_attention *a, int64_t num_tokens)
{
    return (num_tokens + STEP - 1) / STEP * STEP * a->head_dim / 2;
}

static inline int64_t num_kv_heads(const mp_attention *a)
{
    return a->geometry.plane_bytes / (a->geometry.block_size * a->geometry.token_bytes);
}

/* Floats of a line: its scores and weights; for each KV head, query, totals, sums and largest. */
static inline int64_t line_floats(const mp_attention *a)
{
    return SEGMENT + SEGMENT / 2 + num_kv_heads(a) * (a->head_dim / 2 + LANES + a->head_dim + 1);
}

MP_INLINE __m512bh broadcast_pair(const uint16_t *at)
{
    return (__m512bh)_mm512_set1_epi32(*(const stored_pair *)at);
}

/* Tokens [first, end) of a plane, at most a step, packed to `to` unless they are there already. */
static const uint8_t *packed(const tile *tile, const head *h, const uint8_t *plane, int is_values,
                             int64_t first, int64_t end, uint8_t *to)
{
    const int64_t token_bytes = h->attention->geometry.token_bytes;
    if (tile->is_packed)
        return to + first * token_bytes;
    for (int64_t at = first; at < end; at += GROUP)
        pack_group(h, plane, at, is_values, to + (at - first) * token_bytes);
    return to;
}

/* -- scores -- */

/*
 * `num_lines` lines from `line` on, a step's tokens, of which the first is `token` of the segment. The groups
 * `ahead` are fetched meanwhile, unless it is NULL.
 */
MP_INLINE void score(const tile *tile, int num_lines, int64_t line, int64_t token,
                     const uint8_t *keys, const uint8_t *const *ahead)
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
        if (ahead) {
            MP_UNROLL
            for (int g = 0; g < STEP_GROUPS; g++)
                fetch(ahead[g] + d * 32);
        }
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
        const tile *tile, int64_t line, int64_t token, const uint8_t *keys,                       \
        const uint8_t *const *ahead)                                                              \
    {                                                                                             \
        score(tile, num_lines, line, token, keys, ahead);                                         \
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

static void score_step(const tile *tile, int64_t token, const uint8_t *keys,
                       const uint8_t *const *ahead)
{
    for (int64_t line = 0; line < tile->num_lines;) {
        const int64_t count = lines_at_once(tile->num_lines - line);
        switch (count) {
        case 1: score_1(tile, line, token, keys, ahead); break;
        case 2: score_2(tile, line, token, keys, ahead); break;
        case 3: score_3(tile, line, token, keys, ahead); break;
        default: score_6(tile, line, token, keys, ahead); break;
        }
        line += count;
        ahead = NULL;
    }
}

/* -- softmax -- */

/* 2^x within 3e-6 of it, 1 for 0, 0 far below; NaN stays NaN. A polynomial fitted to [-1/2, 1/2]. */
MP_INLINE __m512 power_of_two(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-1e4f), x); /* infinity has no whole part; of NaN it gives NaN */
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
static void soften_segment(const tile *tile, int64_t line, int64_t num_tokens, float factor)
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
    const __m512 by = _mm512_set1_ps(factor), highest = _mm512_set1_ps(top);
    const __m512 shrunk =
        power_of_two(_mm512_set1_ps((tile->largest[line] - top) * factor));
    tile->largest[line] = top;
    __m512 total[2] = {_mm512_mul_ps(_mm512_loadu_ps(totals), shrunk), _mm512_setzero_ps()};
    for (int64_t t = 0; t < end; t += 2 * LANES) {
        __m512 weight[2];
        MP_UNROLL
        for (int i = 0; i < 2; i++) {
            const __m512 score = _mm512_loadu_ps(scores + t + i * LANES);
            /* The difference first: nothing is rounded that is then subtracted. */
            weight[i] = power_of_two(_mm512_mul_ps(_mm512_sub_ps(score, highest), by));
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
 * that begins at `token` of the segment; of the first token of each pair only if `is_half`. `ahead` as above.
 */
MP_INLINE void mix(const tile *tile, int num_lines, int num_vectors, int is_half, int64_t line,
                   int64_t dim, int64_t token, int64_t first, int64_t end, const uint8_t *values,
                   const uint8_t *const *ahead)
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
        if (ahead && num_vectors == STEP_GROUPS) {
            MP_UNROLL
            for (int g = 0; g < STEP_GROUPS; g++)
                fetch(ahead[g] + dim * 32 + pair * 64);
        } else if (ahead) {
            fetch(ahead[pair / (GROUP / 2)] + dim * 32 + pair % (GROUP / 2) * 64);
        }
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
                        int64_t first, int64_t end, const uint8_t *values,
                        const uint8_t *const *ahead)
{
    int64_t dim = 0;
    for (; dim + MAX_VECTORS * LANES <= tile->head_dim; dim += MAX_VECTORS * LANES)
        mix(tile, num_lines, MAX_VECTORS, is_half, line, dim, token, first, end, values, ahead);
    for (; dim < tile->head_dim; dim += LANES)
        mix(tile, num_lines, 1, is_half, line, dim, token, first, end, values, ahead);
}

#define MIX(name, num_lines, is_half)                                                          \
    static __attribute__((noinline)) void name(const tile *tile, int64_t line, int64_t token,  \
                                               int64_t first, int64_t end,                     \
                                               const uint8_t *values,                          \
                                               const uint8_t *const *ahead)                    \
    {                                                                                          \
        mix_dims(tile, num_lines, is_half, line, token, first, end, values, ahead);            \
    }

MIX(mix_half, 1, 1)
MIX(mix_1, 1, 0)
MIX(mix_2, 2, 0)
MIX(mix_3, 3, 0)
MIX(mix_6, 6, 0)

/* How many tokens a line sees of the step that begins at `step_begin` of the sequence. */
static int64_t seen_of(const tile *tile, int64_t line, int64_t step_begin)
{
    const int64_t seen = tile->num_seen[line] - step_begin;
    return seen < 0 ? 0 : seen < STEP ? seen : STEP;
}

/* The step begins at `begin` of the sequence, and `token` of the segment. */
static void mix_step(const tile *tile, int64_t begin, int64_t token, const uint8_t *values,
                     const uint8_t *const *ahead)
{
    for (int64_t line = 0; line < tile->num_lines;) {
        const int64_t count = lines_at_once(tile->num_lines - line);
        const int64_t shared = seen_of(tile, line, begin) / 2; /* pairs: what the first sees */
        switch (count) {
        case 1: mix_1(tile, line, token, 0, shared, values, ahead); break;
        case 2: mix_2(tile, line, token, 0, shared, values, ahead); break;
        case 3: mix_3(tile, line, token, 0, shared, values, ahead); break;
        default: mix_6(tile, line, token, 0, shared, values, ahead); break;
        }
        ahead = NULL;
        for (const int64_t last = line + count; line < last; line++) {
            const int64_t seen = seen_of(tile, line, begin);
            if (shared < seen / 2)
                mix_1(tile, line, token, shared, seen / 2, values, NULL);
            if (seen % 2)
                mix_half(tile, line, token, seen / 2, seen / 2 + 1, values, NULL);
        }
    }
}

/* -- tiles -- */

/* Tokens [segment, segment + SEGMENT) of one KV head. */
static void attend_segment(const tile *tile, const head *h, int64_t segment, const following *next)
{
    const float factor = h->attention->scale * 1.44269504088896341f; /* powers of two, not of e */
    const int64_t left = tile->num_seen[tile->num_lines - 1] - segment;
    const int64_t count = left < SEGMENT ? left : SEGMENT;
    const mp_geometry *g = &h->attention->geometry;
    const uint8_t *ahead[STEP_GROUPS];
    for (int64_t token = 0; token < count; token += STEP) {
        const int64_t begin = segment + token, left_of_it = count - token;
        const int64_t end = begin + (left_of_it < STEP ? left_of_it : STEP);
        const uint8_t *keys = packed(tile, h, h->keys, 0, begin, end, tile->keys);
        for (int i = 0; i < STEP_GROUPS; i++)
            ahead[i] = group_at(g, h->values, h->blocks, h->length, begin + i * GROUP);
        score_step(tile, token, keys, tile->is_packed ? NULL : ahead);
    }
    for (int64_t line = 0; line < tile->num_lines; line++) {
        const int64_t seen = tile->num_seen[line] - segment;
        if (seen > 0)
            soften_segment(tile, line, seen < SEGMENT ? seen : SEGMENT, factor);
    }
    for (int64_t token = 0; token < count; token += STEP) {
        const int64_t begin = segment + token, left_of_it = count - token;
        const int64_t end = begin + (left_of_it < STEP ? left_of_it : STEP);
        const uint8_t *values = packed(tile, h, h->values, 1, begin, end, tile->values);
        for (int i = 0; next && i < STEP_GROUPS; i++)
            ahead[i] = group_at(g, next->plane, next->blocks, next->length,
                                next->first + token + i * GROUP);
        mix_step(tile, begin, token, values, next ? ahead : NULL);
    }
}

/* Queries of one row, and where their results go; of the first token, KV head 0. */
typedef struct {
    const float *query;
    float *out;
    int64_t query_stride, out_stride;
    int64_t num_queries;
} row;

/* The tile of a KV head, whose lines are not those of the others. */
static tile tile_of(const tile *first, const mp_attention *a, int64_t kv_head)
{
    tile one = *first;
    one.query += kv_head * TILE_LINES * a->head_dim;
    one.sums += kv_head * TILE_LINES * a->head_dim;
    one.totals += kv_head * TILE_LINES * LANES;
    one.largest += kv_head * TILE_LINES;
    return one;
}

/* Lines from `first` on, the same of each KV head. */
static void see(tile *tile, const mp_attention *a, const row *r, int64_t first, int64_t length)
{
    const int64_t num_lines = r->num_queries * a->group_size - first;
    tile->num_lines = num_lines < TILE_LINES ? num_lines : TILE_LINES;
    for (int64_t line = 0; line < tile->num_lines; line++)
        tile->num_seen[line] = length - r->num_queries + (first + line) / a->group_size + 1;
}

/* Before it has seen anything. */
static void begin_tile(const tile *tile, const mp_attention *a, const row *r, int64_t kv_head,
                       int64_t first)
{
    const int64_t head_dim = a->head_dim;
    for (int64_t line = 0; line < tile->num_lines; line++) {
        const int64_t token = (first + line) / a->group_size;
        const int64_t query_head = kv_head * a->group_size + (first + line) % a->group_size;
        const float *from = r->query + token * r->query_stride + query_head * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            _mm256_storeu_si256((__m256i *)(tile->query + line * head_dim + d),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + d)));
        tile->largest[line] = -FLT_MAX;
    }
    memset(tile->sums, 0, sizeof(float) * (size_t)(tile->num_lines * head_dim));
    memset(tile->totals, 0, sizeof(float) * (size_t)(tile->num_lines * LANES));
}

static void end_tile(const tile *tile, const mp_attention *a, const row *r, int64_t kv_head,
                     int64_t first)
{
    const int64_t head_dim = a->head_dim;
    for (int64_t line = 0; line < tile->num_lines; line++) {
        const int64_t token = (first + line) / a->group_size;
        const int64_t query_head = kv_head * a->group_size + (first + line) % a->group_size;
        float *to = r->out + token * r->out_stride + query_head * head_dim;
        const float total = sum_of_lanes((floats)_mm512_loadu_ps(tile->totals + line * LANES));
        for (int64_t d = 0; d < head_dim; d += LANES)
            *(stored_floats *)(to + d) =
                *(const stored_floats *)(tile->sums + line * head_dim + d) / total;
    }
}

/* All tiles of a KV head, whose keys and values are packed once for them. */
static void attend_packed(tile *tile, const head *h, const row *r, int64_t kv_head)
{
    const mp_attention *a = h->attention;
    pack_all(h, tile->keys, tile->values);
    for (int64_t first = 0; first < r->num_queries * a->group_size; first += TILE_LINES) {
        see(tile, a, r, first, h->length);
        begin_tile(tile, a, r, kv_head, first);
        for (int64_t at = 0; at < tile->num_seen[tile->num_lines - 1]; at += SEGMENT)
            attend_segment(tile, h, at, NULL);
        end_tile(tile, a, r, kv_head, first);
    }
}

/*
 * One tile of each KV head. Segment after segment of all heads: those of a block lie side by side, on the
 * same pages. `first_head` is KV head 0, and `next` what is packed after the row.
 */
static void attend_heads(tile *tiles, const head *first_head, const row *r, int64_t first,
                         const following *next)
{
    const mp_attention *a = first_head->attention;
    const int64_t head_bytes = a->geometry.block_size * a->geometry.token_bytes;
    const int64_t num_heads = num_kv_heads(a);
    see(tiles, a, r, first, first_head->length);
    for (int64_t kv_head = 0; kv_head < num_heads; kv_head++) {
        const tile tile = tile_of(tiles, a, kv_head);
        begin_tile(&tile, a, r, kv_head, first);
    }
    for (int64_t at = 0; at < first_head->length; at += SEGMENT)
        for (int64_t kv_head = 0; kv_head < num_heads; kv_head++) {
            head h = *first_head;
            h.keys += kv_head * head_bytes;
            h.values += kv_head * head_bytes;
            following then = {h.keys + head_bytes, h.blocks, h.length, at};
            if (kv_head + 1 == num_heads) {
                then.plane = first_head->keys;
                then.first = at + SEGMENT;
                if (then.first >= h.length)
                    then = *next;
            }
            const tile tile = tile_of(tiles, a, kv_head);
            attend_segment(&tile, &h, at, &then);
        }
    for (int64_t kv_head = 0; kv_head < num_heads; kv_head++) {
        const tile tile = tile_of(tiles, a, kv_head);
        end_tile(&tile, a, r, kv_head, first);
    }
}

MP_INLINE void attend(const mp_attention *a, int64_t layer, const mp_attention_rows *rows,
                      const float *query, int64_t query_stride, float *out, int is_last_only,
                      mp_result *result)
{
    if (!rows_are_valid(a, layer, rows, result))
        return;
    const mp_geometry *g = &a->geometry;
    const int64_t num_heads = num_kv_heads(a), head_floats = TILE_LINES * a->head_dim;
    const int64_t out_stride = num_heads * a->group_size * a->head_dim;
    const uint8_t *keys = a->pool + mp_leaf_offset(g, 0, layer);
    float *work = (float *)(((uintptr_t)rows->work + 63) & ~(uintptr_t)63);
    tile tile = {.head_dim = a->head_dim};
    tile.scores = work;
    tile.weights = (uint16_t *)(tile.scores + TILE_LINES * SEGMENT);
    tile.totals = tile.scores + TILE_LINES * SEGMENT / 2 * 3;
    tile.sums = tile.totals + num_heads * TILE_LINES * LANES;
    tile.query = (uint16_t *)(tile.sums + num_heads * head_floats);
    tile.keys = (uint8_t *)(tile.query + num_heads * head_floats);
    tile.values = tile.keys + 4 * run_floats(a, is_last_only ? STEP : rows->max_length);
    tile.largest = (float *)(tile.values + (tile.values - tile.keys));
    for (int64_t i = 0; i < rows->num_rows; i++) {
        const int64_t end = rows->qo_indptr[i + 1];
        const int64_t begin = is_last_only ? end - 1 : rows->qo_indptr[i];
        const head h = {a, keys, keys + g->plane_stride, rows->indices + rows->indptr[i],
                        rows->lengths[i]};
        const row r = {query + begin * query_stride, out + begin * out_stride, query_stride,
                       out_stride, end - begin};
        const int64_t num_lines = r.num_queries * a->group_size;
        if (!is_last_only && num_lines > TILE_LINES) {
            tile.is_packed = 1;
            for (int64_t kv_head = 0; kv_head < num_heads; kv_head++) {
                head one = h;
                one.keys += kv_head * g->block_size * g->token_bytes;
                one.values += kv_head * g->block_size * g->token_bytes;
                attend_packed(&tile, &one, &r, kv_head);
            }
            continue;
        }
        const int64_t other = i + 1 < rows->num_rows ? i + 1 : i;
        const following next = {keys, rows->indices + rows->indptr[other], rows->lengths[other], 0};
        tile.is_packed = 0;
        for (int64_t first = 0; first < num_lines; first += TILE_LINES)
            attend_heads(&tile, &h, &r, first, &next);
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
