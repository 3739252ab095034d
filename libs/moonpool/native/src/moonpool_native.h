/*
 * The native part of Moonpool: copies of KV blocks, their digests, the control page, and the arithmetic
 * of a decode step.
 *
 * Rules
 *  - Plain C11 and POSIX threads. No Python and no torch: the library is called through ctypes, which
 *    releases the interpreter lock, so nothing here may call back.
 *  - Nothing is allocated on the data path and no pointer is kept after a call returns. The copy queue
 *    (copy_queue.c) is the one exception: it keeps a job's pointers until the job has completed.
 *  - Every offset is checked against the size of its region before the first byte is written. A call
 *    that fails has written nothing.
 *  - Geometry (strides, lengths) comes from kv/layout.py as data; here it is only applied.
 *
 * A leaf digest is XXH3-64 over one layer of one block in canonical order: plane after plane (K, then
 * V), each plane one contiguous run. Digest arrays are uint64[num_blocks, num_layers], row-major.
 */
#ifndef MOONPOOL_NATIVE_H
#define MOONPOOL_NATIVE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MP_EXPORT __attribute__((visibility("default")))

/* Raised whenever a signature or a struct changes; native/binding.py has the same number. */
#define MP_ABI_VERSION 13

enum {
    MP_OK = 0,
    MP_SPAN_OUT_OF_BOUNDS = 1,
    MP_BLOCK_OUT_OF_BOUNDS = 2,
    MP_LAYER_OUT_OF_BOUNDS = 3,
    MP_LEAF_ORDER = 4,
    MP_BAD_GEOMETRY = 5,
    MP_SLOT_OUT_OF_BOUNDS = 6,
    MP_CLOSED = 7,
    MP_SYSTEM = 8,
    MP_ROW_OUT_OF_BOUNDS = 9,
};

/* Where the leaves of one group of layers lie in a pool. All bytes, all int64. */
typedef struct {
    int64_t region_bytes;
    int64_t first_byte; /* of block 0, layer 0, plane 0 */
    int64_t num_blocks;
    int64_t num_layers;
    int64_t num_planes;
    int64_t block_stride;
    int64_t layer_stride;
    int64_t plane_stride;
    int64_t plane_bytes;
    int64_t block_size;  /* tokens in a block */
    int64_t token_bytes; /* one token of one head: the innermost run of a plane */
} mp_geometry;

/* How a call ended. `index` is the first offending span, leaf or row when status is not MP_OK. */
typedef struct {
    int64_t status;
    int64_t index;
    int64_t num_bad; /* leaves whose digest differs from the expected one */
} mp_result;

/* One leaf to check. `after_span` is the span that writes its last byte, or -1: check it first. */
typedef struct {
    int64_t block;
    int64_t layer;
    int64_t after_span;
    uint64_t expected;
} mp_leaf;

typedef uint64_t (*mp_leaf_digest_fn)(const uint8_t *first_plane, int64_t plane_bytes,
                                      int64_t plane_stride, int64_t num_planes);

static inline int64_t mp_leaf_offset(const mp_geometry *g, int64_t block, int64_t layer)
{
    return g->first_byte + block * g->block_stride + layer * g->layer_stride;
}

/* Where the leaf's last plane ends. */
static inline int64_t mp_leaf_end(const mp_geometry *g, int64_t block, int64_t layer)
{
    return mp_leaf_offset(g, block, layer) + (g->num_planes - 1) * g->plane_stride + g->plane_bytes;
}

/* All planes of a leaf lie one after another, as its digest takes them. */
static inline int mp_leaf_is_one_run(const mp_geometry *g)
{
    return g->num_planes == 1 || g->plane_stride == g->plane_bytes;
}

typedef uint64_t (*mp_copy_leaf_fn)(uint8_t *to, const uint8_t *from, int64_t num_bytes);
typedef void (*mp_copy_fn)(uint8_t *to, const uint8_t *from, int64_t num_bytes);

/* The variants that suit this machine, chosen when the library is loaded. */
extern mp_leaf_digest_fn mp_leaf_digest;
extern mp_copy_leaf_fn mp_copy_leaf;
extern mp_copy_fn mp_copy;

/* Whoever is told something after this sees all that was written past the cache before. */
static inline void mp_copied_out(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_sfence();
#endif
}

/* True if no leaf of the geometry can lie outside of the region. */
int mp_geometry_is_valid(const mp_geometry *geometry);

MP_EXPORT void mp_copy_verify(const uint8_t *source, int64_t source_bytes, uint8_t *target,
                    int64_t target_bytes, const int64_t *spans, int64_t num_spans,
                    const mp_geometry *geometry, const mp_leaf *leaves, int64_t num_leaves,
                    uint8_t *is_bad, mp_result *result);

/* One read whose bytes come as part of a stream; see scatter.c. */
typedef struct mp_read {
    const int64_t *spans; /* int64[num_spans, 3]; the source offsets are not used */
    int64_t *starts;      /* where in the read's bytes each span begins */
    int64_t num_spans;
    int64_t num_bytes;
    const mp_leaf *leaves; /* in order of done_at */
    int64_t *done_at;      /* how many of the read's bytes complete each leaf */
    int64_t num_leaves;
    uint8_t *is_bad;
    int64_t num_bad;
    /* How far the copy thread is: in bytes, in spans, in leaves. */
    int64_t at, span, leaf;
    _Atomic int64_t state;
    struct mp_read *next;
} mp_read;

/* Reads that are expected, in order, and what became of them. */
typedef struct {
    uint8_t *target;
    const mp_geometry *geometry;
    mp_read *first, *last; /* under the queue's lock */
    _Atomic int64_t num_done;
    _Atomic int64_t num_consumed; /* bytes that were written or thrown away */
    _Atomic int64_t ring_at;      /* the loop wants to know when num_consumed reaches this */
} mp_stream;

int mp_read_take(const mp_stream *stream, mp_read *read, const uint8_t *source, int64_t count);

/* Spans that are read in order, and how far: in rows, and within the row. See gather.c. */
typedef struct {
    const int64_t *spans; /* int64[n, 2] of (offset, length), inside of the pool */
    int64_t row, at;
} mp_gathering;

enum { MP_LINEAR_PANEL = 16 };
enum { MP_FLOAT32 = 0, MP_BFLOAT16 = 1, MP_INT8 = 2 };

/* A weight in panels; see linear.c, and bfloat16_linear.c for products in bfloat16. */
typedef struct {
    const void *panels;
    const float *scale; /* of each output, padded to whole panels; only for int8 */
    const float *bias;  /* the same, or NULL */
    int64_t num_in;
    int64_t num_out;
    int64_t format;
} mp_linear;

/*
 * y[num_rows, num_out] for x[num_rows, num_in]. All are the caller's, who knows their sizes. Unless it is
 * NULL `largest` is of [num_rows, panels]: the largest output of each panel, NaN if one is not finite.
 */
typedef void (*mp_multiply_fn)(const mp_linear *linear, const float *x, int64_t num_rows, float *y,
                               float *largest);

/* A pool to attend to; see attention.c. The first plane is K, the second V. */
typedef struct {
    const uint8_t *pool;
    mp_geometry geometry;
    int64_t group_size; /* query heads that share a KV head */
    int64_t head_dim;   /* whole vectors of 16 */
    int64_t is_bfloat16; /* else float32 */
    float scale;
} mp_attention;

/* Rows of consecutive query tokens; the last of a row sees all of its keys, the others fewer. */
typedef struct {
    int64_t num_rows;
    int64_t num_indices;
    int64_t max_length;       /* at least every length, whole vectors of 16 */
    const int32_t *qo_indptr; /* int32[num_rows + 1]: the queries of row r from qo_indptr[r] on */
    const int32_t *indptr;    /* int32[num_rows + 1] */
    const int32_t *indices;   /* int32[num_indices]: the blocks of row r from indptr[r] on */
    const int64_t *lengths;   /* int64[num_rows]: tokens that the row's last query sees */
    float *work;              /* of mp_attend_work or mp_attend_chunks_work floats, to work in */
} mp_attention_rows;

enum { MP_ATTEND_QUERIES = 3 }; /* whose scores lie side by side in attention.c */
enum { MP_CHUNK_LINES = 24, MP_CHUNK_TOKENS = 4 };

/* Floats of a row's keys, or values, in chunk_attention.c. */
static inline int64_t mp_chunk_run(const mp_attention *a, int64_t max_length)
{
    return (max_length + MP_CHUNK_TOKENS) * a->head_dim;
}

/* Floats that chunk_attention.c works in: keys, values; queries and sums of a tile; its scores. */
static inline int64_t mp_chunks_work(const mp_attention *a, int64_t max_length)
{
    return 2 * mp_chunk_run(a, max_length) + MP_CHUNK_LINES * (2 * a->head_dim + max_length);
}

/*
 * out[queries, heads * head_dim]; those of `query` are `query_stride` floats apart. One kernel attends
 * for the last query of each row, the other for all.
 */
typedef void (*mp_attend_fn)(const mp_attention *attention, int64_t layer,
                             const mp_attention_rows *rows, const float *query,
                             int64_t query_stride, float *out, mp_result *result);

/* What stands between products; see rows.c. */
typedef void (*mp_rms_norm_fn)(const float *x, const float *weight, float eps, int64_t num_rows,
                               int64_t size, float *y);
typedef void (*mp_silu_mul_fn)(const float *x, int64_t num_rows, int64_t size, float *y);

/* Tokens of neighbouring ids that sample.c looks at together: some panels of a product. */
enum { MP_SAMPLE_GROUP = 4 * MP_LINEAR_PANEL };

/* How one row's token is drawn; see sample.c. */
typedef struct {
    double temperature; /* 0: the largest logit */
    double top_p;       /* 1: all */
    double number;      /* uniform in [0, 1) */
    int64_t top_k;      /* 0: all */
} mp_draw;

/*
 * tokens[num_rows] for logits[num_rows, size]; -1 for a row that is not finite. `largest` is what the
 * product that made the logits says of its panels, or NULL. `work` is of `size` words and two for each
 * group.
 */
typedef void (*mp_sample_fn)(const float *logits, const float *largest, int64_t num_rows,
                             int64_t size, const mp_draw *draws, uint64_t *work, int64_t *tokens);

MP_EXPORT void mp_publish(void *page, uint64_t step, uint32_t layers_done);
MP_EXPORT int64_t mp_ring(int32_t eventfd);

#endif
