/*
 * y = x W^T + b for float32 rows x and a weight that was packed once, compiled once per instruction set
 * (vectors.h). Made for the few rows of a decode step: the weight is read from memory once, from its
 * first byte to its last, however many rows there are.
 *
 * Layout: outputs lie in panels of 16. Within a panel input follows input, so that one vector holds the
 * weights of neighbouring outputs:
 *
 *   float32     panel[input][16]
 *   bfloat16    panel[input / 2][16][2]    a 32-bit lane holds two inputs, the even one in its low half
 *   int8        panel[input][16]
 *
 * A bfloat16 is the upper half of a float32: one shift or one mask expands it in a register. An int8 is
 * a share of its output's scale, which enters once, when the output is summed. The last panel is padded
 * with zeros, and so is a last step that is not full: 64 bytes, which hold 16 outputs of 1, 2 or 4 inputs.
 *
 * Reading from memory and computing overlap only because each pass over a panel, of which several rows
 * need more than one, fetches its share of the panel that is next: ten rows then cost hardly twice one. With vectors
 * of 64 bytes each pass fetches all of the next ones, into the second-level cache.
 *
 * Order of summation: an output is one chain of float32 multiply-adds over the inputs in order, from
 * zero, times the scale if there is one; then the bias is added. The number of rows, the tile and the width of a vector do not enter, so a
 * row's result is the same bits in any batch, and on any machine with fused multiply-add.
 */
#include "moonpool_native.h"
#include "vectors.h"

#include <string.h>

enum {
    STEP_BYTES = 4 * MP_LINEAR_PANEL,
    /* A tile's sums and what they are made of stay in registers: 32 of 64 bytes, or 16 of less. */
    MAX_ROWS = MP_VECTOR_BYTES == 64 ? 8 : 5,
    MAX_VECTORS = 8,
    /* Inputs of this size stay in the second-level cache while the whole weight passes by. */
    BLOCK_BYTES = 192 * 1024,
};

/*
 * Vectors of outputs that are summed at once: enough chains to hide the latency of an addition. Where a vector is
 * a panel, one or two rows take panel after panel and leave fetching to the machine, which reads one stream
 * faster than several; int8 comes too slowly for one chain.
 */
static int widest(int64_t format, int64_t num_rows, int64_t left)
{
#if MP_VECTOR_BYTES == 64
    return left < 3 || (num_rows <= 2 && format != MP_INT8) ? 1 : 3;
#else
    (void)format;
    int num_vectors = num_rows == 1 ? 8 : num_rows == 2 ? 4 : 2;
    while (num_vectors > left)
        num_vectors /= 2;
    return num_vectors;
#endif
}

/* What a pass fetches of the panels after its own: in its step i a line for each of its panels. */
typedef struct {
    const uint8_t *at;
    int64_t per_step, per_panel;
} ahead;

/* Inputs that a step holds. */
MP_INLINE int inputs_of_step(int format)
{
    return format == MP_INT8 ? 4 : format == MP_BFLOAT16 ? 2 : 1;
}

/* Input `i` of a step, for a vector of outputs that begins at `at`. */
MP_INLINE floats expand(const uint8_t *at, int format, int i)
{
    if (format == MP_INT8)
        return __builtin_convertvector(widened(at + i * MP_LINEAR_PANEL), floats);
    const words lanes = *(const stored_words *)at;
    if (format == MP_BFLOAT16)
        return (floats)(i == 0 ? lanes << 16 : lanes & 0xffff0000u);
    return (floats)lanes;
}

/*
 * The first `num_inputs` inputs of a step, times the weights at `offset` from where each vector's outputs
 * begin. All counts are constants where this is inlined, but `num_inputs` in a last step.
 */
MP_INLINE void add_step(floats sum[MAX_ROWS][MAX_VECTORS], int format, int num_inputs, int num_rows,
                        int num_vectors, const uint8_t *const *at, int64_t offset, const float *x,
                        int64_t stride)
{
    if (num_vectors > 3) { /* vector after vector: there are more of them than registers */
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++) {
            MP_UNROLL
            for (int i = 0; i < num_inputs; i++) {
                const floats weight = expand(at[v] + offset, format, i);
                MP_UNROLL
                for (int r = 0; r < num_rows; r++)
                    sum[r][v] += weight * x[r * stride + i];
            }
        }
        return;
    }
    MP_UNROLL
    for (int i = 0; i < num_inputs; i++) {
        floats weight[MAX_VECTORS];
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            weight[v] = expand(at[v] + offset, format, i);
        MP_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const float input = x[r * stride + i];
            MP_UNROLL
            for (int v = 0; v < num_vectors; v++)
                sum[r][v] += weight[v] * input;
        }
    }
}

static int64_t bytes_of_panel(const mp_linear *linear)
{
    const int64_t per_step = inputs_of_step((int)linear->format);
    return (linear->num_in + per_step - 1) / per_step * STEP_BYTES;
}

MP_INLINE void fetch(int num_vectors, ahead next, int64_t step)
{
    if (MP_VECTOR_BYTES == 64 && num_vectors == 1)
        return;
    MP_UNROLL
    for (int panel = 0; panel < num_vectors * LANES / MP_LINEAR_PANEL; panel++)
        __builtin_prefetch(next.at + panel * next.per_panel + step * next.per_step, 0,
                           MP_VECTOR_BYTES == 64 ? 2 : 3);
}

MP_INLINE void store(float *y, floats value, int64_t count)
{
    if (count >= LANES)
        memcpy(y, &value, sizeof value);
    else if (count > 0)
        memcpy(y, &value, (size_t)count * sizeof(float));
}

/*
 * Rows [0, num_rows) times the outputs of `num_vectors` vectors from `vector` on, a multiple of
 * `num_vectors`. The flag and the two counts are constants where this is inlined.
 */
MP_INLINE void tile(const mp_linear *linear, int format, int num_rows, int num_vectors,
                    int64_t vector, ahead next, const float *x, float *y)
{
    const int per_step = inputs_of_step(format);
    const int64_t num_in = linear->num_in, panel_bytes = bytes_of_panel(linear);
    const int64_t first = vector * LANES, num_steps = num_in / per_step;
    const int output_bytes = format == MP_INT8 ? 1 : 4; /* from one output of an input to the next */
    const uint8_t *panel =
        (const uint8_t *)linear->panels + first / MP_LINEAR_PANEL * panel_bytes;
    const uint8_t *at[MAX_VECTORS];
    MP_UNROLL
    for (int v = 0; v < num_vectors; v++)
        at[v] = panel + v * LANES / MP_LINEAR_PANEL * panel_bytes +
                (first + v * LANES) % MP_LINEAR_PANEL * output_bytes;

    floats sum[MAX_ROWS][MAX_VECTORS];
    MP_UNROLL
    for (int r = 0; r < num_rows; r++) {
        MP_UNROLL
        for (int v = 0; v < num_vectors; v++)
            sum[r][v] = (floats){0};
    }
    for (int64_t i = 0; i < num_steps; i++) {
        fetch(num_vectors, next, i);
        add_step(sum, format, per_step, num_rows, num_vectors, at, i * STEP_BYTES,
                 x + i * per_step, num_in);
    }
    if (num_steps * per_step < num_in) {
        fetch(num_vectors, next, num_steps);
        add_step(sum, format, (int)(num_in % per_step), num_rows, num_vectors, at,
                 num_steps * STEP_BYTES, x + num_steps * per_step, num_in);
    }

    MP_UNROLL
    for (int v = 0; v < num_vectors; v++) {
        const int64_t output = (vector + v) * LANES;
        floats scale = {0}, bias = {0};
        if (format == MP_INT8)
            scale = *(const stored_floats *)(linear->scale + output);
        if (linear->bias)
            bias = *(const stored_floats *)(linear->bias + output);
        MP_UNROLL
        for (int r = 0; r < num_rows; r++) {
            floats value = format == MP_INT8 ? sum[r][v] * scale : sum[r][v];
            value = linear->bias ? value + bias : value;
            store(y + r * linear->num_out + output, value, linear->num_out - output);
        }
    }
}

/* One function for each size of tile: (rows, vectors). A single vector is what wide ones may leave over. */
#if MP_VECTOR_BYTES == 64
#define TILES(X)                                                   \
    X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) \
    X(1, 3) X(2, 3) X(3, 3) X(4, 3) X(5, 3) X(6, 3) X(7, 3) X(8, 3)
#else
#define TILES(X) X(1, 8) X(1, 4) X(1, 2) X(2, 4) X(2, 2) X(3, 2) X(4, 2) X(5, 2)
#endif

#define DEFINE_TILE(rows, vectors)                                                             \
    static __attribute__((noinline)) void int8_tile_##rows##_##vectors(                        \
        const mp_linear *linear, int64_t vector, ahead next, const float *x, float *y)         \
    {                                                                                          \
        tile(linear, MP_INT8, rows, vectors, vector, next, x, y);                              \
    }                                                                                          \
    static __attribute__((noinline)) void bfloat16_tile_##rows##_##vectors(                    \
        const mp_linear *linear, int64_t vector, ahead next, const float *x, float *y)         \
    {                                                                                          \
        tile(linear, MP_BFLOAT16, rows, vectors, vector, next, x, y);                          \
    }                                                                                          \
    static __attribute__((noinline)) void float32_tile_##rows##_##vectors(                     \
        const mp_linear *linear, int64_t vector, ahead next, const float *x, float *y)         \
    {                                                                                          \
        tile(linear, MP_FLOAT32, rows, vectors, vector, next, x, y);                           \
    }
TILES(DEFINE_TILE)

static void any_tile(const mp_linear *linear, int64_t num_rows, int num_vectors, int64_t vector,
                     ahead next, const float *x, float *y)
{
#define CALL_TILE(rows, vectors)                                          \
    case (rows) * 16 + (vectors):                                         \
        if (linear->format == MP_INT8)                                    \
            int8_tile_##rows##_##vectors(linear, vector, next, x, y);     \
        else if (linear->format == MP_BFLOAT16)                           \
            bfloat16_tile_##rows##_##vectors(linear, vector, next, x, y); \
        else                                                              \
            float32_tile_##rows##_##vectors(linear, vector, next, x, y);  \
        return;
    switch (num_rows * 16 + num_vectors) { TILES(CALL_TILE) }
}

/*
 * What a tile has just stored, by panels: its largest output, NaN if one is not finite. A tile may be a part
 * of a panel.
 */
static void survey(const mp_linear *linear, int64_t num_rows, int num_vectors, int64_t vector,
                   const float *y, float *largest)
{
    const int64_t num_panels = (linear->num_out + MP_LINEAR_PANEL - 1) / MP_LINEAR_PANEL;
    const int64_t first = vector * LANES, end = first + num_vectors * LANES;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *outputs = y + row * linear->num_out;
        for (int64_t at = first; at < end && at < linear->num_out;) {
            const int64_t panel = at / MP_LINEAR_PANEL;
            const int is_begun = at % MP_LINEAR_PANEL != 0;
            floats top = (floats){0} + outputs[at], flaw = top - top;
            for (; at < end && at < linear->num_out && at / MP_LINEAR_PANEL == panel; at += LANES) {
                floats value = (floats){0} + outputs[at];
                if (linear->num_out - at >= LANES)
                    value = *(const stored_floats *)(outputs + at);
                else
                    memcpy(&value, outputs + at, (size_t)(linear->num_out - at) * sizeof(float));
                top = larger(value, top);
                flaw += value - value;
            }
            float *told = largest + row * num_panels + panel;
            const float found = largest_of_lanes(top) + sum_of_lanes(flaw);
            if (!is_begun || found > *told || found != found)
                *told = found;
        }
    }
}

/* Few enough rows that their inputs stay in the cache. */
static void multiply(const mp_linear *linear, const float *x, int64_t num_rows, float *y,
                     float *largest)
{
    const int64_t panel_bytes = bytes_of_panel(linear);
    const int64_t num_panels = (linear->num_out + MP_LINEAR_PANEL - 1) / MP_LINEAR_PANEL;
    const int64_t total = num_panels * (MP_LINEAR_PANEL / LANES);
    /* As equal as possible: 8 rows are 4 and 4, not 5 and 3, where a tile has 5. */
    const int64_t num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    int num_vectors;
    for (int64_t vector = 0; vector < total; vector += num_vectors) {
        num_vectors = widest(linear->format, num_rows, total - vector);
        /* After the last tile there is nothing: a fetch of what is not there does nothing. */
        ahead next = {.at = (const uint8_t *)linear->panels + (vector + num_vectors) * LANES /
                                                                  MP_LINEAR_PANEL * panel_bytes,
                      .per_step = STEP_BYTES / num_parts,
                      .per_panel = panel_bytes};
        if (MP_VECTOR_BYTES == 64) { /* line by line of one run, in each pass */
            next.per_step = num_vectors * STEP_BYTES;
            next.per_panel = STEP_BYTES;
        }
        int64_t row = 0;
        for (int64_t part = 0; part < num_parts; part++) {
            const int64_t count = num_rows / num_parts + (part < num_rows % num_parts);
            any_tile(linear, count, num_vectors, vector, next, x + row * linear->num_in,
                     y + row * linear->num_out);
            if (largest)
                survey(linear, count, num_vectors, vector, y + row * linear->num_out,
                       largest + row * num_panels);
            if (MP_VECTOR_BYTES < 64)
                next.at += panel_bytes / num_parts;
            row += count;
        }
    }
}

MP_EXPORT void MP_JOIN(mp_multiply_, MP_ISA)(const mp_linear *, const float *, int64_t, float *,
                                             float *);

void MP_JOIN(mp_multiply_, MP_ISA)(const mp_linear *linear, const float *x, int64_t num_rows,
                                   float *y, float *largest)
{
    const int64_t num_panels = (linear->num_out + MP_LINEAR_PANEL - 1) / MP_LINEAR_PANEL;
    int64_t block = BLOCK_BYTES / 4 / linear->num_in / MAX_ROWS * MAX_ROWS;
    block = block < MAX_ROWS ? MAX_ROWS : block;
    for (int64_t row = 0; row < num_rows; row += block) {
        const int64_t count = num_rows - row < block ? num_rows - row : block;
        multiply(linear, x + row * linear->num_in, count, y + row * linear->num_out,
                 largest ? largest + row * num_panels : NULL);
    }
}
