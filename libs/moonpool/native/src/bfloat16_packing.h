/*
 * Keys and values of a paged pool of bfloat16, packed for the instruction that adds two products to each lane,
 * for bfloat16_attention.c, and fetched before they are.
 */
#ifndef MOONPOOL_BFLOAT16_PACKING_H
#define MOONPOOL_BFLOAT16_PACKING_H

#include "moonpool_native.h"
#include "vectors.h"

#include <string.h>

enum {
    GROUP = 16, /* tokens that are packed at once: lanes */
    AHEAD = 4,  /* groups that are fetched before they are packed for many tiles */
};

/* One KV head of one row. */
typedef struct {
    const mp_attention *attention;
    const uint8_t *keys; /* of block 0: this layer and head */
    const uint8_t *values;
    const int32_t *blocks;
    int64_t length; /* tokens */
} head;

/* 16 bytes of each fourth row. */
MP_INLINE __m512i fourths(const uint8_t *at, int64_t stride)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + 4 * stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + 8 * stride)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at + 12 * stride)), 3);
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
        v = _mm512_inserti64x4(v, _mm256_loadu_si256((const __m256i *)odd), 1);
        _mm512_storeu_si512(to + i * to_stride, _mm512_permutexvar_epi16(places, v));
    }
}

/* Where tokens from `first` on lie, of a plane of which the row is `length` long; the last ones at least. */
MP_INLINE const uint8_t *group_at(const mp_geometry *g, const uint8_t *plane, const int32_t *blocks,
                                  int64_t length, int64_t first)
{
    const int64_t token = first < length ? first : (length - 1) / GROUP * GROUP;
    return plane + blocks[token / g->block_size] * g->block_stride +
           token % g->block_size * g->token_bytes;
}

/*
 * To the second cache: there many more lines may be on their way than to the first. Where tokens are packed
 * step by step, products fetch what comes then, line by line, so that memory and arithmetic are both at work.
 */
MP_INLINE void fetch(const uint8_t *at) { __builtin_prefetch(at, 0, 2); }

MP_INLINE void fetch_group(const head *h, const uint8_t *plane, int64_t first)
{
    const mp_geometry *g = &h->attention->geometry;
    const uint8_t *at = group_at(g, plane, h->blocks, h->length, first);
    for (int64_t i = 0; i < GROUP * g->token_bytes; i += 64)
        fetch(at + i);
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
        fetch_group(h, h->keys, first + AHEAD * GROUP);
        fetch_group(h, h->values, first + AHEAD * GROUP);
        pack_group(h, h->keys, first, 0, keys + at);
        pack_group(h, h->values, first, 1, values + at);
    }
}

#endif
