/* Attention whose heads never meet (softmax or unnormalised scores, no value network), forward and backward, on the CPU.

   A vector holds W heads side by side: of one sequence where it has at least W, else of SIDE consecutive sequences. So no
   vector is padded for the length, and nothing is summed across its lanes. native.py compiles this file with the macros of
   native.c; `Call` is the one of native.c too, but bias, mask, keep and grad_bias are laid out for these vectors:
   [group of sequences, query, key, lane], `head` being the stride between keys. */
#include "vectors.h"

#define SOFTMAX 0
#define NONE 1
#define SIDE (HEADS < W ? W / HEADS : 1) /* sequences in a vector */
#define WIDE (HEADS < W ? HEADS : W)     /* heads of each */

#include "call.h"

/* Where lane l of group g begins for token 0; NULL for a lane that nothing belongs to. */
static inline REAL *lane(const Call *c, const Tensor *tensor, int64_t g, int l) {
    const int64_t vectors = (HEADS + WIDE - 1) / WIDE;
    const int64_t b = g / vectors * SIDE + l / WIDE, h = g % vectors * WIDE + l % WIDE;
    return l < SIDE * WIDE && h < HEADS && b < c->batch ? tensor->data + b * tensor->batch + h * tensor->head : NULL;
}

/* The vectors of one query's bias, mask or dropout, `step` numbers apart from key to key; NULL where there is none. */
typedef struct {
    REAL *data;
    int64_t step;
} Row;

static inline Row row(const Tensor *tensor, int64_t g, int64_t q) {
    const int64_t vectors = (HEADS + WIDE - 1) / WIDE;
    if (!tensor->data) return (Row){NULL, 0};
    REAL *group = tensor->data + g / vectors / tensor->group * tensor->batch + g % vectors * WIDE;
    return (Row){group + q * tensor->token, tensor->head};
}

static inline loose *at(Row row, int64_t k) { return (loose *)(row.data + k * row.step); }

/* Split the even and the odd lanes of `count` vectors, a power of two, `log2(count)` times: what was [lane, depth] becomes
   [depth, lane]; with `back`, the reverse. */
static inline __attribute__((always_inline)) void unzip(vec *x, const int count, const int back) {
#ifndef __clang__
    ivec even, odd, low, high;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        even[l] = 2 * l, odd[l] = 2 * l + 1;
        low[l] = l / 2 + l % 2 * W, high[l] = W / 2 + l / 2 + l % 2 * W;
    }
    for (int pass = 1; pass < count; pass *= 2) {
        vec y[count];
#pragma GCC unroll 16
        for (int i = 0; i < count / 2; i++) {
            const int a = back ? i : 2 * i, b = back ? i + count / 2 : 2 * i + 1;
            y[back ? 2 * i : i] = __builtin_shuffle(x[a], x[b], back ? low : even);
            y[back ? 2 * i + 1 : i + count / 2] = __builtin_shuffle(x[a], x[b], back ? high : odd);
        }
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) x[i] = y[i];
    }
#endif
}

/* Whether the heads of a token that share a vector are one piece of memory that unzip can turn. */
static inline int whole(const Tensor *tensor, int depth) {
#ifdef __clang__
    return 0;
#else
    return tensor->depth == 1 && tensor->head == depth && HEADS % WIDE == 0 && (depth & (depth - 1)) == 0;
#endif
}

/* Copy the tokens of group g to vectors [token, depth], or with `back` from them; their own lanes only. */
static inline __attribute__((always_inline)) void copy(const Call *c, vec *vectors, const Tensor *tensor, int64_t g,
                                                       int64_t tokens, const int depth, const int back) {
    const int64_t token = tensor->token, step = tensor->depth;
    const int piece = whole(tensor, depth) ? WIDE : 1;
    for (int l = 0; l < W; l += piece) {
        REAL *other = lane(c, tensor, g, l), *own = (REAL *)vectors + l * (piece > 1 ? depth : 1);
        for (int64_t t = 0; other && t < tokens; t++, own += depth * W, other += token)
            if (piece > 1)
                memcpy(back ? other : own, back ? own : other, sizeof(REAL) * WIDE * depth);
            else
                for (int d = 0; d < depth; d++)
                    *(back ? other + d * step : own + d * W) = back ? own[d * W] : other[d * step];
    }
}

static inline __attribute__((always_inline)) void gather(const Call *c, vec *to, const Tensor *from, int64_t g,
                                                         int64_t tokens, const int depth) {
    memset(to, 0, sizeof(vec) * tokens * depth);
    copy(c, to, from, g, tokens, depth, 0);
    if (whole(from, depth) && WIDE > 1)
        for (int64_t t = 0; t < tokens; t++) unzip(to + t * depth, depth, 0);
}

static inline __attribute__((always_inline)) void scatter(const Call *c, vec *from, const Tensor *to, int64_t g,
                                                          int64_t tokens, const int depth) {
    if (whole(to, depth) && WIDE > 1)
        for (int64_t t = 0; t < tokens; t++) unzip(from + t * depth, depth, 1);
    copy(c, from, to, g, tokens, depth, 1);
}

/* The codes of one query, a vector for each key. */
static inline void codes(const Call *c, vec *code, const vec *query, const vec *key, Row bias, Row mask) {
    const int softmax = NORM == SOFTMAX;
    const int64_t keys = c->keys;
    vec best = splat(sizeof(REAL) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308), sum = splat(0);
    for (int64_t k = 0; k < keys; k++) {
        vec s = bias.data ? *at(bias, k) : splat(0);
        for (int d = 0; d < DK; d++) s += query[d] * key[k * DK + d];
        if (mask.data) s = pick(*at(mask, k) != 0, s, splat(softmax ? -INFINITY : 0));
        best = pick(s > best, s, best);
        code[k] = s;
    }
    if (!softmax) return;
    for (int64_t k = 0; k < keys; k++) {
        code[k] = exp_negative(code[k] - best);
        sum += code[k];
    }
    const vec share = pick(sum == 0, splat(0), 1 / sum); /* 0: a query without any key */
    for (int64_t k = 0; k < keys; k++) code[k] *= share;
}

static void forward(const Call *c, vec *scratch, int64_t g, int64_t part) {
    (void)part;
    const int64_t keys = c->keys, queries = c->queries;
    vec *key = scratch, *value = key + keys * DK, *query = value + keys * DV, *out = query + queries * DK;
    vec *code = out + queries * DV;
    gather(c, key, &c->key, g, keys, DK);
    gather(c, value, &c->value, g, keys, DV);
    gather(c, query, &c->query, g, queries, DK);
    for (int64_t q = 0; q < queries; q++) {
        vec asked[DK], sum[DV];
        for (int d = 0; d < DK; d++) asked[d] = query[q * DK + d] * (REAL)c->scale;
        for (int d = 0; d < DV; d++) sum[d] = splat(0);
        const Row mask = row(&c->mask, g, q), kept = row(&c->keep, g, q);
        codes(c, code, asked, key, row(&c->bias, g, q), mask);
        for (int64_t k = 0; k < keys; k++) {
            const vec keep = kept.data ? *at(kept, k) : splat(1), used = code[k] * keep;
            for (int d = 0; d < DV; d++) sum[d] += used * value[k * DV + d];
        }
        for (int d = 0; d < DV; d++) out[q * DV + d] = sum[d];
    }
    scatter(c, out, &c->out, g, queries, DV);
}

static void backward(const Call *c, vec *scratch, int64_t g, int64_t part) {
    const int64_t keys = c->keys, queries = c->queries;
    vec *key = scratch, *value = key + keys * DK, *query = value + keys * DV, *grad = query + queries * DK;
    vec *grad_key = grad + queries * DV, *grad_value = grad_key + keys * DK;
    vec *code = grad_value + keys * DV, *grad_code = code + keys;
    gather(c, key, &c->key, g, keys, DK);
    gather(c, value, &c->value, g, keys, DV);
    gather(c, query, &c->query, g, queries, DK);
    gather(c, grad, &c->out, g, queries, DV);
    memset(grad_key, 0, sizeof(vec) * keys * (DK + DV));
    Tensor own_bias = c->grad_bias; /* this thread's copy */
    if (own_bias.data) own_bias.data += part * c->part_bias;
    for (int64_t q = 0; q < queries; q++) {
        vec asked[DK], out[DV], sum[DK], along = splat(0); /* along: the sum over keys of code times its gradient */
        for (int d = 0; d < DK; d++) asked[d] = query[q * DK + d] * (REAL)c->scale, sum[d] = splat(0);
        for (int d = 0; d < DV; d++) out[d] = grad[q * DV + d];
        const Row mask = row(&c->mask, g, q), kept = row(&c->keep, g, q), grad_bias = row(&own_bias, g, q);
        codes(c, code, asked, key, row(&c->bias, g, q), mask);
        for (int64_t k = 0; k < keys; k++) {
            const vec keep = kept.data ? *at(kept, k) : splat(1), used = code[k] * keep;
            vec s = splat(0);
            for (int d = 0; d < DV; d++) {
                s += out[d] * value[k * DV + d];
                grad_value[k * DV + d] += used * out[d];
            }
            grad_code[k] = s * keep;
            along += code[k] * grad_code[k];
        }
        for (int64_t k = 0; k < keys; k++) {
            vec s = grad_code[k];
            if (NORM == SOFTMAX) s = code[k] * (s - along);
            if (mask.data) s = pick(*at(mask, k) != 0, s, splat(0));
            if (grad_bias.data) *at(grad_bias, k) += s;
            for (int d = 0; d < DK; d++) {
                sum[d] += s * key[k * DK + d];
                grad_key[k * DK + d] += s * asked[d];
            }
        }
        for (int d = 0; d < DK; d++) query[q * DK + d] = sum[d] * (REAL)c->scale; /* no longer needed as the query */
    }
    scatter(c, query, &c->grad_query, g, queries, DK);
    scatter(c, grad_key, &c->grad_key, g, keys, DK);
    scatter(c, grad_value, &c->grad_value, g, keys, DV);
}

static int run(const Call *c, int back) {
    const int64_t groups = (c->batch + SIDE - 1) / SIDE * ((HEADS + WIDE - 1) / WIDE);
    return deal(c, groups, 2 * c->keys * (DK + DV + 1) + c->queries * (DK + DV), back);
}

int hyla_forward(const Call *c) { return run(c, 0); }
int hyla_backward(const Call *c) { return run(c, 1); }
int hyla_lanes(void) { return W; }
