/* Linear layers with what stands before and after them, forward and backward, on the CPU:

     out_i = before(x) W_i^T + b_i (+ residual)     before: LayerNorm, GELU (its tanh approximation) or nothing

   TILE rows (tokens) at a time, so that between the matrix products, which are the BLAS library's, everything stays in the
   second-level cache; each thread has rows of its own. Compiled by fused.py with the macros of vectors.h.
   All arrays are contiguous; widths are numbers of columns. */
#include "vectors.h"

#define TILE 128
#define MAX_LAYERS 3

/* sgemm_ or dgemm_. Whole numbers are passed by address, so that 32 bits can be read from these 64 (little-endian). */
typedef void Gemm(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const REAL *,
                  const REAL *, const int64_t *, const REAL *, const int64_t *, const REAL *, REAL *, const int64_t *);

typedef struct {
    const REAL *weight; /* [width, inputs]; forward: turned, [inputs, width] */
    const REAL *bias;
    REAL *out; /* backward: its gradient */
    int64_t width;
} Layer;

typedef struct {
    Gemm *gemm;
    int64_t rows, inputs, layers, gelu, threads;
    double epsilon;
    const REAL *x, *scale, *shift, *residual; /* scale: NULL where there is no LayerNorm */
    REAL *grad_x;                             /* NULL where it is not wanted */
    REAL *grads; /* a copy for each thread, all 0 at first: of each layer's weight, then each one's bias, scale, shift */
    int64_t copy;
    Layer layer[MAX_LAYERS];
} Call;

/* c[m, n] = a b + keep c, row by row; `turned` says that a is stored as [k, m]. */
static void multiply(const Call *call, int64_t m, int64_t n, int64_t k, const REAL *a, int turned, const REAL *b,
                     REAL keep, REAL *c) {
    const REAL one = 1;
    call->gemm("N", turned ? "T" : "N", &n, &m, &k, &one, b, &n, a, turned ? &m : &k, &keep, c, &n);
}

/* Pointers and numbers that a loop uses are read from memory before it: what it writes could be them, for all C knows. */
static void normalise(const Call *c, const REAL *x, int64_t rows, REAL *out, REAL *means, REAL *roots) {
    const int64_t width = c->inputs;
    const REAL *scale = c->scale, *shift = c->shift;
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        REAL mean = 0, square = 0;
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < width; i++) mean += x[i];
        mean /= width;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        const REAL root = 1 / sqrt(square / width + c->epsilon);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * root * scale[i] + shift[i];
        means[r] = mean;
        roots[r] = root;
    }
}

/* From the gradient of LayerNorm's result to that of its input, and the sums for scale and shift. */
static void normalise_backward(const Call *c, const REAL *x, int64_t rows, const REAL *grad, const REAL *means,
                               const REAL *roots, REAL *grad_x, REAL *grad_scale, REAL *grad_shift) {
    const int64_t width = c->inputs;
    const REAL *scale = c->scale;
    for (int64_t r = 0; r < rows; r++, x += width, grad += width, grad_x += width) {
        const REAL mean = means[r], root = roots[r];
        REAL sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
        for (int64_t i = 0; i < width; i++) {
            const REAL normal = (x[i] - mean) * root, g = grad[i] * scale[i];
            sum += g;
            dot += g * normal;
            grad_scale[i] += grad[i] * normal;
            grad_shift[i] += grad[i];
        }
        sum /= width, dot /= width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            grad_x[i] = root * (grad[i] * scale[i] - sum - (x[i] - mean) * root * dot);
    }
}

/* GELU as x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative where `slope` is not NULL. */
static inline __attribute__((always_inline)) void gelu_vector(const REAL *x, REAL *out, REAL *slope, size_t bytes) {
    const REAL twice = 2 * 0.79788456080286535588, cubic = 0.044715;
    vec v = splat(0);
    memcpy(&v, x, bytes);
    const vec s = sigmoid(twice * (v + cubic * v * v * v)), y = v * s;
    memcpy(out, &y, bytes);
    if (slope) {
        const vec d = s + y * (1 - s) * twice * (1 + 3 * cubic * v * v);
        memcpy(slope, &d, bytes);
    }
}

static void gelu(const REAL *x, int64_t count, REAL *out, REAL *slope) {
    int64_t i = 0;
    for (; i + W <= count; i += W) gelu_vector(x + i, out + i, slope ? slope + i : NULL, sizeof(vec));
    if (i < count) gelu_vector(x + i, out + i, slope ? slope + i : NULL, (count - i) * sizeof(REAL));
}

static void forward(const Call *c, int64_t first, int64_t rows, REAL *scratch) {
    REAL *before = scratch, *moments = scratch + TILE * c->inputs;
    const REAL *x = c->x + first * c->inputs;
    if (c->scale)
        normalise(c, x, rows, before, moments, moments + TILE);
    else if (c->gelu)
        gelu(x, rows * c->inputs, before, NULL);
    for (int64_t l = 0; l < c->layers; l++) {
        const int64_t width = c->layer[l].width;
        const REAL *bias = c->layer[l].bias, *residual = c->residual ? c->residual + first * width : NULL;
        REAL *out = c->layer[l].out + first * width;
        multiply(c, rows, width, c->inputs, c->scale || c->gelu ? before : x, 0, c->layer[l].weight, 0, out);
        for (int64_t r = 0; r < rows; r++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                out[r * width + i] += residual ? bias[i] + residual[r * width + i] : bias[i];
    }
}

static void backward(const Call *c, int64_t first, int64_t rows, REAL *scratch, REAL *grads) {
    const int64_t inputs = c->inputs;
    REAL *before = scratch, *slope = before + TILE * inputs;
    REAL *grad = slope + TILE * inputs, *mean = grad + TILE * inputs;
    REAL *grad_weight = grads, *grad_bias = grads;
    REAL *grad_x = c->grad_x ? c->grad_x + first * inputs : NULL;
    const REAL *x = c->x + first * inputs;
    if (c->scale)
        normalise(c, x, rows, before, mean, mean + TILE);
    else if (c->gelu)
        gelu(x, rows * inputs, before, slope);
    else
        grad = grad_x;
    if (!c->scale && !grad_x) grad = NULL;
    for (int64_t l = 0; l < c->layers; l++) grad_bias += c->layer[l].width * inputs;
    for (int64_t l = 0; l < c->layers; l++) {
        const int64_t width = c->layer[l].width;
        const REAL *out = c->layer[l].out + first * width;
        multiply(c, width, inputs, rows, out, 1, c->scale || c->gelu ? before : x, 1, grad_weight);
        for (int64_t r = 0; r < rows; r++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) grad_bias[i] += out[r * width + i];
        if (grad) multiply(c, rows, inputs, width, out, 0, c->layer[l].weight, l > 0, grad);
        grad_weight += width * inputs;
        grad_bias += width;
    }
    if (c->scale) /* grad_bias has come to the gradients of scale and shift */
        normalise_backward(c, x, rows, grad, mean, mean + TILE, grad_x ? grad_x : grad, grad_bias, grad_bias + inputs);
    else if (c->gelu && grad_x)
#pragma omp simd
        for (int64_t i = 0; i < rows * inputs; i++) grad_x[i] = grad[i] * slope[i];
}

/* Tiles are dealt to the threads in fixed contiguous parts, so that the same number of threads gives the same bits.
   Returns 0, or 1 where there is no memory. */
static int run(const Call *c, int back) {
    const int64_t tiles = (c->rows + TILE - 1) / TILE, parts = c->threads;
    const int64_t size = TILE * (3 * c->inputs + 16); /* parts share no page */
    REAL *scratch = aligned_alloc(64, sizeof(REAL) * size * parts);
    if (!scratch) return 1;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t t = tiles * part / parts; t < tiles * (part + 1) / parts; t++) {
            const int64_t first = t * TILE, rows = c->rows - first < TILE ? c->rows - first : TILE;
            if (back)
                backward(c, first, rows, scratch + part * size, c->grads + part * c->copy);
            else
                forward(c, first, rows, scratch + part * size);
        }
    free(scratch);
    return 0;
}

int hyla_forward(const Call *c) { return run(c, 0); }
int hyla_backward(const Call *c) { return run(c, 1); }
