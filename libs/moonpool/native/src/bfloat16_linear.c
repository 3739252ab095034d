/*
 * y = x W^T + b in bfloat16 arithmetic (AVX512-BF16): the weight as linear.c packs one of bfloat16, the rows x
 * rounded to bfloat16 once a call, to the nearest and to even, their products added in float32. Where a CPU has
 * no such instruction nothing is compiled here, and the library says so (mp_has_bfloat16_products).
 *
 * Order of summation: an output is one chain over the pairs of inputs in order, from zero, each step one
 * vdpbf16ps: the odd input's product is added to the sum, then the even one's. Then the bias is added. Neither
 * the number of rows nor the tile enters, so a row's result is the same bits in any batch. The instruction
 * takes subnormal inputs for zero and makes zero of subnormal sums.
 *
 * Reading: a core reads one stream of memory faster than several, so up to FEW_ROWS rows take panel after
 * panel and leave fetching to the machine. More rows are a tile's work; each tile fetches the three panels that are
 * next, which lie in one run, and does it in each pass over its own.
 */
#include "moonpool_native.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

#include <string.h>

enum {
    FEW_ROWS = 4,
    MAX_ROWS = 8,
    /* Sums of a tile and what they are made of stay in 32 registers. */
    MAX_PANELS = 3,
    STEP_BYTES = 4 * MP_LINEAR_PANEL,
    /* Rounded rows, which stay in the second-level cache while the weight passes by. They lie on the stack: a
     * thread that multiplies needs one of half a megabyte. */
    BLOCK_BYTES = 256 * 1024,
    /* Pairs of inputs of a block; sums of a longer row go on from what y holds. */
    BLOCK_PAIRS = 2048,
    /* Rows of some sizes would else meet in the same lines of the first-level cache. */
    SPARE_PAIRS = 16,
};

/* Some inputs of some rows, rounded. */
typedef struct {
    const mp_linear *linear;
    const uint32_t *pairs;
    int64_t stride; /* pairs from one row to the next */
    int64_t first_pair, num_pairs;
    int is_last;
    float *y;
    float *largest;
} block;

static int64_t pairs_of(const mp_linear *linear) { return (linear->num_in + 1) / 2; }

static int64_t panels_of(const mp_linear *linear)
{
    return (linear->num_out + MP_LINEAR_PANEL - 1) / MP_LINEAR_PANEL;
}

/* Of the outputs from `first` on, those that a panel has. */
MP_INLINE __mmask16 mask_of(int64_t first, int64_t end)
{
    return end - first >= 16 ? 0xffff : (__mmask16)((1u << (end - first)) - 1);
}

/* Its largest output, NaN if one is not finite. */
MP_INLINE float survey(__m512 sum, __mmask16 mask)
{
    /* Those that are none are another one's. */
    const __m512 top = _mm512_mask_mov_ps(_mm512_broadcastss_ps(_mm512_castps512_ps128(sum)), mask, sum);
    return largest_of_lanes((floats)top) + sum_of_lanes((floats)_mm512_sub_ps(top, top));
}

/* `num_rows` rows from `row` on times `num_panels` panels, which are constants where this is inlined. */
MP_INLINE void tile(const block *b, int num_rows, int num_panels, int64_t row, int64_t panel)
{
    const mp_linear *linear = b->linear;
    const int64_t panel_bytes = pairs_of(linear) * STEP_BYTES, num_out = linear->num_out;
    const uint8_t *at =
        (const uint8_t *)linear->panels + panel * panel_bytes + b->first_pair * STEP_BYTES;
    const uint8_t *next = at + num_panels * panel_bytes;
    /* Whole panels lie in one run, a block of each does not. */
    const int is_run = b->num_pairs == pairs_of(linear);
    const int64_t per_step = is_run ? num_panels * STEP_BYTES : STEP_BYTES;
    const int64_t per_panel = is_run ? STEP_BYTES : panel_bytes;
    const uint32_t *x = b->pairs + row * b->stride;
    float *y = b->y + row * num_out;
    __m512 sum[MAX_ROWS][MAX_PANELS];
    MP_UNROLL
    for (int r = 0; r < num_rows; r++) {
        MP_UNROLL
        for (int p = 0; p < num_panels; p++) {
            const int64_t output = (panel + p) * MP_LINEAR_PANEL;
            sum[r][p] = b->first_pair == 0 ? _mm512_setzero_ps()
                                           : _mm512_maskz_loadu_ps(mask_of(output, num_out),
                                                                   y + r * num_out + output);
        }
    }
    for (int64_t i = 0; i < b->num_pairs; i++) {
        __m512bh weight[MAX_PANELS];
        MP_UNROLL
        for (int p = 0; p < num_panels; p++) {
            if (num_panels > 1)
                __builtin_prefetch(next + i * per_step + p * per_panel, 0, 2);
            weight[p] = (__m512bh)_mm512_loadu_si512(at + p * panel_bytes + i * STEP_BYTES);
        }
        MP_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[r * b->stride + i]);
            MP_UNROLL
            for (int p = 0; p < num_panels; p++)
                sum[r][p] = _mm512_dpbf16_ps(sum[r][p], pair, weight[p]);
        }
    }
    MP_UNROLL
    for (int p = 0; p < num_panels; p++) {
        const int64_t output = (panel + p) * MP_LINEAR_PANEL;
        const __mmask16 mask = mask_of(output, num_out);
        const int has_bias = b->is_last && linear->bias;
        const __m512 bias = has_bias ? _mm512_loadu_ps(linear->bias + output) : _mm512_setzero_ps();
        MP_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const __m512 value = has_bias ? _mm512_add_ps(sum[r][p], bias) : sum[r][p];
            _mm512_mask_storeu_ps(y + r * num_out + output, mask, value);
            if (b->largest && b->is_last)
                b->largest[(row + r) * panels_of(linear) + panel + p] = survey(value, mask);
        }
    }
}

/* One function for each size of tile: (rows, panels). A single panel is what wide ones may leave over. */
#define TILES(X)                                                                \
    X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) X(4, 3) X(5, 3) \
    X(6, 3) X(7, 3) X(8, 3)

#define DEFINE_TILE(rows, panels)                                                  \
    static __attribute__((noinline)) void tile_##rows##_##panels(const block *b, int64_t row, \
                                                                 int64_t panel)    \
    {                                                                              \
        tile(b, rows, panels, row, panel);                                         \
    }
TILES(DEFINE_TILE)

static void any_tile(const block *b, int64_t num_rows, int num_panels, int64_t row, int64_t panel)
{
#define CALL_TILE(rows, panels)               \
    case (rows) * 4 + (panels):               \
        tile_##rows##_##panels(b, row, panel); \
        return;
    switch (num_rows * 4 + num_panels) { TILES(CALL_TILE) }
}

static void multiply(const block *b, int64_t num_rows)
{
    const int64_t num_panels = panels_of(b->linear);
    /* As equal as possible, and then none has fewer than FEW_ROWS. */
    const int64_t num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    int width;
    for (int64_t panel = 0; panel < num_panels; panel += width) {
        width = num_rows <= FEW_ROWS || num_panels - panel < MAX_PANELS ? 1 : MAX_PANELS;
        int64_t row = 0;
        for (int64_t part = 0; part < num_parts; part++) {
            const int64_t count = num_rows / num_parts + (part < num_rows % num_parts);
            any_tile(b, count, width, row, panel);
            row += count;
        }
    }
}

/* Inputs [first, first + 32) of a row as pairs; what the row does not have is zero. */
MP_INLINE __m512i rounded(const float *x, int64_t first, int64_t num_in)
{
    const int64_t left = num_in - first;
    const __m512 low = _mm512_maskz_loadu_ps(mask_of(first, num_in), x + first);
    const __m512 high =
        left > 16 ? _mm512_maskz_loadu_ps(mask_of(first + 16, num_in), x + first + 16)
                  : _mm512_setzero_ps();
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

MP_EXPORT void MP_JOIN(mp_multiply_bfloat16_, MP_ISA)(const mp_linear *, const float *, int64_t,
                                                      float *, float *);

void MP_JOIN(mp_multiply_bfloat16_, MP_ISA)(const mp_linear *linear, const float *x,
                                            int64_t num_rows, float *y, float *largest)
{
    uint32_t pairs[BLOCK_BYTES / sizeof(uint32_t)] __attribute__((aligned(64)));
    const int64_t num_in = linear->num_in, all_pairs = pairs_of(linear);
    const int64_t per_row = all_pairs < BLOCK_PAIRS ? all_pairs : BLOCK_PAIRS;
    const int64_t stride = (per_row + 15) / 16 * 16 + SPARE_PAIRS;
    const int64_t most = (int64_t)sizeof pairs / 4 / stride / MAX_ROWS * MAX_ROWS;
    const int64_t num_blocks = (num_rows + most - 1) / most;
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t count = num_rows / num_blocks + (i < num_rows % num_blocks);
        for (int64_t first = 0; first < all_pairs; first += per_row) {
            const int64_t left = all_pairs - first, num_pairs = left < per_row ? left : per_row;
            for (int64_t r = 0; r < count; r++) {
                for (int64_t pair = 0; pair < num_pairs; pair += 16)
                    _mm512_store_si512(pairs + r * stride + pair,
                                       rounded(x + r * num_in, 2 * (first + pair), num_in));
            }
            const block b = {
                .linear = linear,
                .pairs = pairs,
                .stride = stride,
                .first_pair = first,
                .num_pairs = num_pairs,
                .is_last = num_pairs == left,
                .y = y,
                .largest = largest,
            };
            multiply(&b, count);
        }
        x += count * num_in;
        y += count * linear->num_out;
        if (largest)
            largest += count * panels_of(linear);
    }
}

#endif
