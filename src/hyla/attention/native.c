/* Attention as a hypernetwork on the CPU, forward and backward (the equations are in README.md and eager.py).

   native.py compiles this file once for each mechanism, dtype and set of head sizes, with these macros:
     REAL, INT     float and int32_t, or double and int64_t
     HEADS DK DV   heads, width per head of queries/keys and of values: constants, so that the loops over them unroll
     NORM          SOFTMAX, NONE or RMS_HEAD
     DEPTH         1 (ordinary attention) or 2 (the value network of HYLA)
     ACTIVATION    IDENTITY, RELU, SILU or GELU
     BYTES         at most how wide a vector is: narrower ones can waste less on padding

   Vectors run over the keys of one query, W at a time (a tile): per query everything stays in the first-level cache, and
   the latent codes, the hidden layer and their gradients never reach memory. The last tile is padded with keys of 0.
   The backward pass computes the codes again, which costs less than reading them back would. */
#include "vectors.h"

#define SOFTMAX 0
#define NONE 1
#define RMS_HEAD 2
#define IDENTITY 0
#define RELU 1
#define SILU 2
#define GELU 3

#define HK (HEADS * DK)
#define HV (HEADS * DV)
#define EPSILON ((REAL)1e-6) /* RMS_EPSILON of mechanisms.py */

#include "call.h"

/* One level of `lanes` below: `count` vectors become half as many, lane bit `s` telling which of two a lane belongs to. A
   function of its own, so that the compiler knows `s` and with it the shuffles. */
static inline __attribute__((always_inline)) void halve(vec *group, const int count, const int s, const int largest) {
#ifndef __clang__
    ivec straight, crossed;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        straight[l] = l & s ? W + l : l;
        crossed[l] = (l ^ s) + (l & s ? W : 0);
    }
#pragma GCC unroll 16
    for (int j = 0; j < count; j += 2) {
        vec a = __builtin_shuffle(group[j], group[j + 1], straight);
        vec b = __builtin_shuffle(group[j], group[j + 1], crossed);
        if (largest)
            group[j / 2] = pick(a > b, a, b);
        else
            group[j / 2] = a + b;
    }
#endif
}

/* out[i] = the sum of the lanes of x[i], or the largest; destroys x. */
static inline __attribute__((always_inline)) void lanes(vec *x, int count, REAL *out, const int largest) {
    int i = 0;
#ifndef __clang__
    for (; i + W <= count; i += W) {
        halve(x + i, W, 1, largest);
        if (W > 2) halve(x + i, W / 2, 2, largest);
        if (W > 4) halve(x + i, W / 4, 4, largest);
        if (W > 8) halve(x + i, W / 8, 8, largest);
        *(loose *)(out + i) = x[i];
    }
#endif
    for (; i < count; i++) {
        out[i] = x[i][0];
        for (int l = 1; l < W; l++) out[i] = !largest ? out[i] + x[i][l] : x[i][l] > out[i] ? x[i][l] : out[i];
    }
}

static inline void totals(vec *x, int count, REAL *out) { lanes(x, count, out, 0); }

static inline vec reciprocal_root(vec x) {
    vec y;
    for (int i = 0; i < W; i++) y[i] = 1 / (sizeof(REAL) == 4 ? sqrtf(x[i]) : sqrt(x[i]));
    return y;
}

static inline vec normal_cdf(vec x) { /* no vector version: this activation is seldom used */
    vec y;
    for (int i = 0; i < W; i++) y[i] = (REAL)(0.5 * (1 + erf(0.70710678118654752440 * x[i])));
    return y;
}

static inline vec activate(vec x) {
    switch (ACTIVATION) {
        case RELU: return pick(x <= 0, splat(0), x);
        case SILU: return x * sigmoid(x);
        case GELU: return x * normal_cdf(x);
        default: return x;
    }
}

static inline vec slope(vec x) {
    vec s;
    switch (ACTIVATION) {
        case RELU: return pick(x <= 0, splat(0), splat(1));
        case SILU: s = sigmoid(x); return s * (1 + x * (1 - s));
        case GELU:
            s = exp_negative(x * x * (REAL)-0.5);
            return normal_cdf(x) + x * s * (REAL)0.39894228040143267794;
        default: return splat(1);
    }
}

/* The first element of `tensor` for one sequence and query. */
static inline REAL *at(const Tensor *tensor, int64_t b, int64_t t) {
    return tensor->data ? tensor->data + b / tensor->group * tensor->batch + t * tensor->token : NULL;
}

static inline __attribute__((always_inline)) void swap(vec *rows, const int s) {
#ifndef __clang__
    ivec low, high;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        low[l] = l & s ? W + l - s : l;
        high[l] = l & s ? W + l : l + s;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (!(i & s)) {
            vec a = rows[i], b = rows[i + s];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + s] = __builtin_shuffle(a, b, high);
        }
#endif
}

/* Turn a square of W x W numbers: lane j of row i becomes lane i of row j, by swapping ever larger blocks. */
static inline void turn(vec *rows) {
#ifdef __clang__
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            REAL x = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = x;
        }
#else
    swap(rows, 1);
    if (W > 2) swap(rows, 2);
    if (W > 4) swap(rows, 4);
    if (W > 8) swap(rows, 8);
#endif
}

/* How many of the numbers of one token can be read W at a time. */
static inline int together(const Tensor *tensor, int depth) {
    return tensor->depth == 1 && tensor->head == depth ? HEADS * depth / W * W : 0;
}

/* Keys or values of one sequence, turned so that a vector holds W tokens. */
static void gather(vec *tiles, const Tensor *from, int64_t b, int64_t tokens, const int depth) {
    const int width = HEADS * depth, whole = together(from, depth);
    for (int64_t first = 0; first < tokens; first += W, tiles += width) {
        const int count = tokens - first < W ? tokens - first : W;
        for (int j = 0; j < whole; j += W) {
            vec square[W];
            for (int i = 0; i < W; i++)
                square[i] = i < count ? *(const loose *)(at(from, b, first + i) + j) : splat(0);
            turn(square);
            for (int i = 0; i < W; i++) tiles[j + i] = square[i];
        }
        for (int j = whole; j < width; j++) {
            const REAL *source = at(from, b, first) + j / depth * from->head + j % depth * from->depth;
            for (int i = 0; i < W; i++) tiles[j][i] = i < count ? source[i * from->token] : 0;
        }
    }
}

static void scatter(const vec *tiles, const Tensor *to, int64_t b, int64_t tokens, const int depth) {
    const int width = HEADS * depth, whole = together(to, depth);
    for (int64_t first = 0; first < tokens; first += W, tiles += width) {
        const int count = tokens - first < W ? tokens - first : W;
        for (int j = 0; j < whole; j += W) {
            vec square[W];
            for (int i = 0; i < W; i++) square[i] = tiles[j + i];
            turn(square);
            for (int i = 0; i < count; i++) *(loose *)(at(to, b, first + i) + j) = square[i];
        }
        for (int j = whole; j < width; j++) {
            REAL *target = at(to, b, first) + j / depth * to->head + j % depth * to->depth;
            for (int i = 0; i < count; i++) target[i * to->token] = tiles[j][i];
        }
    }
}

/* One query (or its gradient) of one sequence, all heads, times `factor`. */
static inline void gather_row(REAL *row, const Tensor *from, int64_t b, int64_t q, int depth, REAL factor) {
    const REAL *source = at(from, b, q);
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < depth; d++) row[h * depth + d] = source[h * from->head + d * from->depth] * factor;
}

static inline void scatter_row(const REAL *row, const Tensor *to, int64_t b, int64_t q, int depth, REAL factor) {
    REAL *target = at(to, b, q);
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < depth; d++) target[h * to->head + d * to->depth] = row[h * depth + d] * factor;
}

/* Head h of one tile of a bias, mask or dropout row. */
static inline vec load(const REAL *row, const Tensor *tensor, int h, int64_t tile) {
    return *(const loose *)(row + h * tensor->head + tile * W);
}

/* Scores of one query, score[tile][head]; masked ones are `blank`. Heads outside, so that the query is loaded once. */
static inline void query_scores(const Call *c, vec *score, const REAL *query, const vec *key, int64_t b, int64_t q,
                                REAL blank) {
    const int64_t tiles = (c->keys + W - 1) / W;
    const REAL *bias = at(&c->bias, b, q), *mask = at(&c->mask, b, q);
    for (int h = 0; h < HEADS; h++)
        for (int64_t t = 0; t < tiles; t++) {
            const vec *k = key + t * HK + h * DK;
            vec s = bias ? load(bias, &c->bias, h, t) : splat(0);
            for (int d = 0; d < DK; d++) s += query[h * DK + d] * k[d];
            if (mask) s = pick(load(mask, &c->mask, h, t) != 0, s, splat(blank));
            score[t * HEADS + h] = s;
        }
}

/* Latent codes of one query, code[tile][head]; for RMS_HEAD also 1 / RMS of each pair, root[tile]. */
static inline void query_codes(const Call *c, vec *code, vec *root, const REAL *query, const vec *key, int64_t b,
                               int64_t q) {
    const int64_t tiles = (c->keys + W - 1) / W;
#if NORM == SOFTMAX
    const REAL lowest = sizeof(REAL) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308;
    vec best[HEADS], sum[HEADS];
    for (int h = 0; h < HEADS; h++) best[h] = splat(lowest), sum[h] = splat(0);
    query_scores(c, code, query, key, b, q, -INFINITY);
    for (int64_t t = 0; t < tiles; t++) {
        if (t == tiles - 1) { /* the padding is masked */
            ivec real;
            for (int i = 0; i < W; i++) real[i] = -(t * W + i < c->keys);
            for (int h = 0; h < HEADS; h++) code[t * HEADS + h] = pick(real, code[t * HEADS + h], splat(-INFINITY));
        }
        for (int h = 0; h < HEADS; h++) best[h] = pick(code[t * HEADS + h] > best[h], code[t * HEADS + h], best[h]);
    }
    REAL top[HEADS];
    lanes(best, HEADS, top, 1);
    for (int64_t t = 0; t < tiles; t++)
        for (int h = 0; h < HEADS; h++) {
            code[t * HEADS + h] = exp_negative(code[t * HEADS + h] - top[h]);
            sum[h] += code[t * HEADS + h];
        }
    REAL share[HEADS];
    totals(sum, HEADS, share);
    for (int h = 0; h < HEADS; h++) share[h] = share[h] == 0 ? 0 : 1 / share[h]; /* 0: a query without any key */
    for (int64_t t = 0; t < tiles; t++)
        for (int h = 0; h < HEADS; h++) code[t * HEADS + h] *= share[h];
#else
    query_scores(c, code, query, key, b, q, 0);
#if NORM == RMS_HEAD
    for (int64_t t = 0; t < tiles; t++) {
        vec square = splat(0);
        for (int h = 0; h < HEADS; h++) square += code[t * HEADS + h] * code[t * HEADS + h];
        root[t] = reciprocal_root(square / (REAL)HEADS + EPSILON);
        for (int h = 0; h < HEADS; h++) code[t * HEADS + h] *= root[t];
    }
#endif
#endif
}

static void forward(const Call *c, vec *scratch, int64_t b, int64_t part) {
    (void)part;
    const int64_t tiles = (c->keys + W - 1) / W;
    vec *key = scratch, *value = key + tiles * HK, *code = value + tiles * HV, *root = code + tiles * HEADS;
    vec *hidden = root + tiles, out[HV];
    REAL query[HK], row[HV];
    gather(key, &c->key, b, c->keys, DK);
    gather(value, &c->value, b, c->keys, DV);
    for (int64_t q = 0; q < c->queries; q++) {
        gather_row(query, &c->query, b, q, DK, c->scale);
        query_codes(c, code, root, query, key, b, q);
        const REAL *keep = at(&c->keep, b, q);
        if (keep)
            for (int64_t t = 0; t < tiles; t++)
                for (int h = 0; h < HEADS; h++) code[t * HEADS + h] *= load(keep, &c->keep, h, t);
#if DEPTH == 2
        for (int64_t t = 0; t < tiles; t++) {
            vec x[DV];
            for (int d = 0; d < DV; d++) x[d] = splat(0);
            for (int h = 0; h < HEADS; h++)
                for (int d = 0; d < DV; d++) x[d] += code[t * HEADS + h] * value[t * HV + h * DV + d];
            for (int d = 0; d < DV; d++) hidden[t * DV + d] = activate(x[d]);
        }
#endif
        for (int h = 0; h < HEADS; h++) {
            vec sum[DV];
            for (int d = 0; d < DV; d++) sum[d] = splat(0);
            for (int64_t t = 0; t < tiles; t++) {
                const vec *x = DEPTH == 1 ? value + t * HV + h * DV : hidden + t * DV;
                for (int d = 0; d < DV; d++) sum[d] += code[t * HEADS + h] * x[d];
            }
            for (int d = 0; d < DV; d++) out[h * DV + d] = sum[d];
        }
        totals(out, HV, row);
        scatter_row(row, &c->out, b, q, DV, 1);
    }
}

static void backward(const Call *c, vec *scratch, int64_t b, int64_t part) {
    const int64_t tiles = (c->keys + W - 1) / W;
    vec *key = scratch, *value = key + tiles * HK, *code = value + tiles * HV, *root = code + tiles * HEADS;
    vec *grad_key = root + tiles, *grad_value = grad_key + tiles * HK, *grad_code = grad_value + tiles * HV;
    REAL query[HK], row[HK], g[HV];
    gather(key, &c->key, b, c->keys, DK);
    gather(value, &c->value, b, c->keys, DV);
    memset(grad_key, 0, sizeof(vec) * tiles * (HK + HV));
    for (int64_t q = 0; q < c->queries; q++) {
        gather_row(query, &c->query, b, q, DK, c->scale);
        gather_row(g, &c->out, b, q, DV, 1);
        query_codes(c, code, root, query, key, b, q);
        const REAL *keep = at(&c->keep, b, q), *mask = at(&c->mask, b, q);
        REAL *grad_bias = at(&c->grad_bias, b, q);
        if (grad_bias) grad_bias += part * c->part_bias;
#if NORM == SOFTMAX
        vec along[HEADS]; /* sum over keys of code times its gradient */
        for (int h = 0; h < HEADS; h++) along[h] = splat(0);
#endif
        for (int64_t t = 0; t < tiles; t++) {
            const vec *v = value + t * HV;
            vec *a = code + t * HEADS, *da = grad_code + t * HEADS, *dv = grad_value + t * HV, used[HEADS];
            for (int h = 0; h < HEADS; h++) used[h] = a[h] * (keep ? load(keep, &c->keep, h, t) : splat(1));
#if DEPTH == 1
            for (int h = 0; h < HEADS; h++) {
                vec sum = splat(0);
                for (int d = 0; d < DV; d++) {
                    sum += g[h * DV + d] * v[h * DV + d];
                    dv[h * DV + d] += used[h] * g[h * DV + d];
                }
                da[h] = sum;
            }
#else
            vec hidden[DV], grad_hidden[DV];
            for (int d = 0; d < DV; d++) hidden[d] = grad_hidden[d] = splat(0);
            for (int h = 0; h < HEADS; h++)
                for (int d = 0; d < DV; d++) {
                    hidden[d] += used[h] * v[h * DV + d];
                    grad_hidden[d] += used[h] * g[h * DV + d];
                }
            for (int d = 0; d < DV; d++) {
                grad_hidden[d] *= slope(hidden[d]);
                hidden[d] = activate(hidden[d]);
            }
            for (int h = 0; h < HEADS; h++) {
                vec sum = splat(0);
                for (int d = 0; d < DV; d++) {
                    sum += g[h * DV + d] * hidden[d] + v[h * DV + d] * grad_hidden[d];
                    dv[h * DV + d] += used[h] * grad_hidden[d];
                }
                da[h] = sum;
            }
#endif
            if (keep)
                for (int h = 0; h < HEADS; h++) da[h] *= load(keep, &c->keep, h, t);
#if NORM == SOFTMAX
            for (int h = 0; h < HEADS; h++) along[h] += a[h] * da[h];
#elif NORM == RMS_HEAD
            vec dot = splat(0);
            for (int h = 0; h < HEADS; h++) dot += a[h] * da[h];
            dot /= (REAL)HEADS;
            for (int h = 0; h < HEADS; h++) da[h] = (da[h] - a[h] * dot) * root[t];
#endif
        }
#if NORM == SOFTMAX
        REAL dot[HEADS];
        totals(along, HEADS, dot);
#endif
        vec grad_query[HK];
        for (int h = 0; h < HEADS; h++) {
            vec sum[DK];
            for (int d = 0; d < DK; d++) sum[d] = splat(0);
            for (int64_t t = 0; t < tiles; t++) {
                const vec *k = key + t * HK + h * DK;
                vec ds = grad_code[t * HEADS + h], *dk = grad_key + t * HK + h * DK;
#if NORM == SOFTMAX
                ds = code[t * HEADS + h] * (ds - dot[h]);
#endif
                if (mask) ds = pick(load(mask, &c->mask, h, t) != 0, ds, splat(0));
                if (grad_bias) *(loose *)(grad_bias + h * c->grad_bias.head + t * W) += ds;
                for (int d = 0; d < DK; d++) {
                    sum[d] += ds * k[d];
                    dk[d] += ds * query[h * DK + d];
                }
            }
            for (int d = 0; d < DK; d++) grad_query[h * DK + d] = sum[d];
        }
        totals(grad_query, HK, row);
        scatter_row(row, &c->grad_query, b, q, DK, c->scale);
    }
    scatter(grad_key, &c->grad_key, b, c->keys, DK);
    scatter(grad_value, &c->grad_value, b, c->keys, DV);
}

static int run(const Call *c, int back) {
    const int64_t tiles = (c->keys + W - 1) / W;
    return deal(c, c->batch, tiles * (2 * HK + 2 * HV + 2 * HEADS + DV + 1), back);
}

int hyla_forward(const Call *c) { return run(c, 0); }
int hyla_backward(const Call *c) { return run(c, 1); }
int hyla_lanes(void) { return W; }
