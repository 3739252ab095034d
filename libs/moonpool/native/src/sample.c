/*
 * From logits to one token per row, as engine/sampler.py says, compiled once per instruction set
 * (vectors.h). A row is read from memory once, and what it takes more than once stays in the cache:
 *
 *   1. the largest logit of each group of 64, and whether all are finite; if the product that made the
 *      logits has noted the largest of each panel (linear.c), the row itself is not read for it
 *   2. greedy: the first of the largest, in the first group that has it
 *      top-k, top-p: only groups whose largest logit may be among the likeliest are looked at again; a
 *      heap of those tokens gives the likeliest one by one, until there are enough
 *      otherwise: the weights of all tokens, summed by groups
 *   3. the inverse of the cumulative distribution, in token-id order
 *
 * Weights are exp((logit - largest) / temperature) in double. A row's token depends on nothing but the row.
 */
#include "moonpool_native.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

enum {
    PANEL = MP_LINEAR_PANEL,
    GROUP = MP_SAMPLE_GROUP,
    /* Tokens that top-p looks at before it looks at all: about so many. */
    NUM_LIKELIEST = 128,
};

typedef double doubles __attribute__((vector_size(MP_VECTOR_BYTES)));
typedef uint64_t wide_words __attribute__((vector_size(MP_VECTOR_BYTES)));
typedef float narrow_floats __attribute__((vector_size(MP_VECTOR_BYTES / 2)));
typedef narrow_floats stored_narrow_floats __attribute__((aligned(4), may_alias));

enum { WIDE_LANES = MP_VECTOR_BYTES / 8 };

/* One row, and what is kept of it. */
typedef struct {
    const float *logits;
    const float *panels; /* the largest logit of each, or NULL */
    int64_t size;
    int64_t num_groups;
    float *largest;  /* of each group */
    double *sums;    /* of each group's weights */
    uint64_t *heap;  /* a token each: its logit, in order, above the inverse of its id */
    float top;
    double temperature;
} row;

/* exp(x) for x <= 0; 0 below the smallest normal. Taylor's series, |r| <= ln 2 / 2. */
MP_INLINE doubles exponential_wide(doubles x)
{
    const doubles round = (doubles){0} + 6755399441055744.0; /* 1.5 * 2^52 */
    const wide_words is_normal = (wide_words)(x > -708.0);
    x = (doubles)((wide_words)x & is_normal);
    const doubles shifted = x * 1.4426950408889634074 + round;
    const doubles n = shifted - round;
    const doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    doubles p = (doubles){0} + 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    /* The low bits of `shifted` are n: they become the exponent of a power of 2. */
    const wide_words power = ((wide_words)shifted << 52) + (wide_words)((doubles){0} + 1.0);
    return (doubles)((wide_words)(p * (doubles)power) & is_normal);
}

/* Weights of a group's tokens, and their number. There is room for whole vectors. */
static int64_t weigh_group(const row *r, int64_t group, double *weights)
{
    const int64_t first = group * GROUP;
    const int64_t count = r->size - first < GROUP ? r->size - first : GROUP;
    for (int64_t i = 0; i < count; i += WIDE_LANES) {
        narrow_floats logits = (narrow_floats){0} + r->top;
        if (count - i >= WIDE_LANES)
            logits = *(const stored_narrow_floats *)(r->logits + first + i);
        else
            memcpy(&logits, r->logits + first + i, (size_t)(count - i) * sizeof(float));
        const doubles x = __builtin_convertvector(logits, doubles);
        const doubles w = exponential_wide((x - (double)r->top) / r->temperature);
        memcpy(weights + i, &w, sizeof w);
    }
    return count;
}

static double weight_of(const row *r, float logit)
{
    const doubles x = (doubles){0} + (((double)logit - (double)r->top) / r->temperature);
    return exponential_wide(x)[0];
}

/* Fills `largest` and `top`; 0 if a logit is not finite. */
static int survey(row *r)
{
    integers is_bad = {0};
    floats top = (floats){0} - INFINITY;
    for (int64_t group = 0; group < r->num_groups; group++) {
        const float *at = r->logits + group * GROUP;
        const int64_t count = r->size - group * GROUP < GROUP ? r->size - group * GROUP : GROUP;
        floats largest = (floats){0} - INFINITY;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const floats x = *(const stored_floats *)(at + i);
            is_bad |= (x - x) != 0.0f;
            largest = larger(x, largest);
        }
        if (i < count) {
            floats x = (floats){0} + at[i];
            memcpy(&x, at + i, (size_t)(count - i) * sizeof(float));
            is_bad |= (x - x) != 0.0f;
            largest = larger(x, largest);
        }
        top = larger(largest, top);
        r->largest[group] = largest_of_lanes(largest);
    }
    r->top = largest_of_lanes(top);
    for (int lane = 0; lane < LANES; lane++)
        if (is_bad[lane])
            return 0;
    return 1;
}

/* The same from what is known of the panels, but for `largest`. */
static int survey_panels(row *r)
{
    const int64_t num_panels = (r->size + PANEL - 1) / PANEL;
    floats top = (floats){0} + r->panels[0], flaw = {0};
    for (int64_t i = 0; i < num_panels; i += LANES) {
        floats x = (floats){0} + r->panels[i];
        if (num_panels - i >= LANES)
            x = *(const stored_floats *)(r->panels + i);
        else
            memcpy(&x, r->panels + i, (size_t)(num_panels - i) * sizeof(float));
        top = larger(x, top);
        flaw += x - x;
    }
    r->top = largest_of_lanes(top);
    return sum_of_lanes(flaw) == 0;
}

static void fill_largest(row *r)
{
    const int64_t num_panels = (r->size + PANEL - 1) / PANEL;
    for (int64_t group = 0; group < r->num_groups; group++) {
        const int64_t first = group * GROUP / PANEL, left = num_panels - first;
        float largest = r->panels[first];
        for (int64_t i = 1; i < GROUP / PANEL && i < left; i++)
            largest = r->panels[first + i] > largest ? r->panels[first + i] : largest;
        r->largest[group] = largest;
    }
}

static int64_t first_of_the_largest(const row *r)
{
    int64_t token = 0;
    if (r->panels)
        while (r->panels[token / PANEL] != r->top)
            token += PANEL;
    else
        while (r->largest[token / GROUP] != r->top)
            token += GROUP;
    while (r->logits[token] != r->top)
        token++;
    return token;
}

/* Keys are ordered as tokens are: by logit, the lower id first among equals. */
static uint64_t key_of(float logit, int64_t token)
{
    uint32_t bits;
    logit += 0.0f; /* there is one zero */
    memcpy(&bits, &logit, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)token);
}

static int64_t token_of(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

static void sift(uint64_t *heap, int64_t size, int64_t at)
{
    const uint64_t key = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] > heap[child])
            child++;
        if (heap[child] <= key)
            break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

static void make_heap(uint64_t *heap, int64_t size)
{
    for (int64_t at = size / 2 - 1; at >= 0; at--)
        sift(heap, size, at);
}

/* The largest goes behind the others: heap[size - 1] afterwards. */
static uint64_t pop(uint64_t *heap, int64_t size)
{
    const uint64_t largest = heap[0];
    heap[0] = heap[size - 1];
    sift(heap, size - 1, 0);
    heap[size - 1] = largest;
    return largest;
}

/* A logit that at least `count` tokens reach, if there are as many groups: so many have one that does. */
static float reached_by(const row *r, int64_t count)
{
    if (count > r->num_groups)
        return -INFINITY;
    for (int64_t group = 0; group < r->num_groups; group++)
        r->heap[group] = key_of(r->largest[group], group);
    make_heap(r->heap, r->num_groups);
    int64_t group = 0;
    for (int64_t i = 0; i < count; i++)
        group = token_of(pop(r->heap, r->num_groups - i));
    return r->largest[group];
}

/* Makes a heap of all tokens whose logit is at least `least`; their number. */
static int64_t gather(const row *r, float least)
{
    int64_t size = 0;
    for (int64_t group = 0; group < r->num_groups; group++) {
        if (r->largest[group] < least)
            continue;
        const int64_t end = (group + 1) * GROUP < r->size ? (group + 1) * GROUP : r->size;
        for (int64_t token = group * GROUP; token < end; token++) {
            if (r->panels && token % PANEL == 0 && r->panels[token / PANEL] < least)
                token += PANEL - 1;
            else if (r->logits[token] >= least)
                r->heap[size++] = key_of(r->logits[token], token);
        }
    }
    make_heap(r->heap, size);
    return size;
}

/* Sums of weights by groups, and of all. */
static double sum_all(const row *r)
{
    double weights[GROUP] __attribute__((aligned(64)));
    double total = 0;
    for (int64_t group = 0; group < r->num_groups; group++) {
        const int64_t count = weigh_group(r, group, weights);
        double sum[4] = {0};
        for (int64_t i = 0; i < count; i++)
            sum[i % 4] += weights[i];
        r->sums[group] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        total += r->sums[group];
    }
    return total;
}

/* The first token whose cumulative weight exceeds `target`, of all tokens. */
static int64_t draw_of_all(const row *r, double target)
{
    double weights[GROUP] __attribute__((aligned(64)));
    double before = 0;
    int64_t group = 0;
    while (group < r->num_groups - 1 && before + r->sums[group] <= target)
        before += r->sums[group++];
    int64_t count = weigh_group(r, group, weights);
    for (int64_t i = 0; i < count; i++) {
        before += weights[i];
        if (before > target)
            return group * GROUP + i;
    }
    /* What rounding leaves over belongs to the last token that has a weight. */
    for (;; count = weigh_group(r, --group, weights))
        for (int64_t i = count - 1; i >= 0; i--)
            if (weights[i] > 0)
                return group * GROUP + i;
}

/* The same of the tokens of `kept`, whose order is lost. */
static int64_t draw_of(const row *r, uint64_t *kept, int64_t num_kept, double number)
{
    /* Without the logits in front, the order of keys is that of ids, the highest first. */
    for (int64_t i = 0; i < num_kept; i++)
        kept[i] &= 0xffffffffu;
    make_heap(kept, num_kept);
    double total = 0;
    for (int64_t i = 0; i < num_kept; i++)
        total += weight_of(r, r->logits[token_of(pop(kept, num_kept - i))]);
    const double target = number * total;
    double cumulative = 0;
    int64_t last = token_of(kept[num_kept - 1]);
    for (int64_t i = num_kept - 1; i >= 0; i--) {
        const int64_t token = token_of(kept[i]);
        const double weight = weight_of(r, r->logits[token]);
        cumulative += weight;
        if (weight > 0)
            last = token;
        if (cumulative > target)
            return token;
    }
    return last;
}

/* How many of the likeliest tokens reach `mass`, taken from the heap; `size` + 1 if they do not. */
static int64_t take_mass(const row *r, int64_t size, double mass)
{
    double running = 0;
    for (int64_t taken = 0; taken < size; taken++) {
        running += weight_of(r, r->logits[token_of(pop(r->heap, size - taken))]);
        if (running >= mass)
            return taken + 1;
    }
    return size + 1;
}

/* Of the `num_kept` likeliest, behind the heap: how many, the likeliest first, reach `top_p` of them. */
static int64_t within(const row *r, const uint64_t *kept, int64_t num_kept, double top_p)
{
    double total = 0, running = 0;
    for (int64_t i = num_kept - 1; i >= 0; i--)
        total += weight_of(r, r->logits[token_of(kept[i])]);
    for (int64_t taken = 0; taken < num_kept; taken++) {
        running += weight_of(r, r->logits[token_of(kept[num_kept - 1 - taken])]);
        if (running >= top_p * total)
            return taken + 1;
    }
    return num_kept;
}

static int64_t sample_row(row *r, const mp_draw *draw)
{
    if (!(r->panels ? survey_panels(r) : survey(r)))
        return -1;
    if (draw->temperature == 0)
        return first_of_the_largest(r);
    if (r->panels)
        fill_largest(r);
    r->temperature = draw->temperature;
    if (draw->top_k > 0 && draw->top_k < r->size) {
        const int64_t size = gather(r, reached_by(r, draw->top_k));
        for (int64_t i = 0; i < draw->top_k; i++)
            pop(r->heap, size - i);
        uint64_t *kept = r->heap + size - draw->top_k;
        if (draw->top_p >= 1)
            return draw_of(r, kept, draw->top_k, draw->number);
        const int64_t num_kept = within(r, kept, draw->top_k, draw->top_p);
        return draw_of(r, r->heap + size - num_kept, num_kept, draw->number);
    }
    const double total = sum_all(r);
    if (draw->top_p >= 1)
        return draw_of_all(r, draw->number * total);
    int64_t size = gather(r, reached_by(r, NUM_LIKELIEST));
    int64_t num_kept = take_mass(r, size, draw->top_p * total);
    if (num_kept > size && size < r->size) {
        size = gather(r, -INFINITY);
        num_kept = take_mass(r, size, draw->top_p * total);
    }
    num_kept = num_kept > size ? size : num_kept;
    return draw_of(r, r->heap + size - num_kept, num_kept, draw->number);
}

MP_EXPORT void MP_JOIN(mp_sample_, MP_ISA)(const float *, const float *, int64_t, int64_t,
                                           const mp_draw *, uint64_t *, int64_t *);

void MP_JOIN(mp_sample_, MP_ISA)(const float *logits, const float *largest, int64_t num_rows,
                                 int64_t size, const mp_draw *draws, uint64_t *work,
                                 int64_t *tokens)
{
    const int64_t num_panels = (size + PANEL - 1) / PANEL;
    const int64_t num_groups = (size + GROUP - 1) / GROUP;
    row r = {.size = size, .num_groups = num_groups};
    r.heap = work;
    r.sums = (double *)(work + size);
    r.largest = (float *)(work + size + num_groups);
    for (int64_t i = 0; i < num_rows; i++) {
        r.logits = logits + i * size;
        r.panels = largest ? largest + i * num_panels : NULL;
        tokens[i] = sample_row(&r, &draws[i]);
    }
}
