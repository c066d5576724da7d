/* What native.py passes to native.c and across.c. Strides are in elements. `group` consecutive sequences (across.c: groups
   of sequences) share one entry of the first axis. */
typedef struct {
    REAL *data;
    int64_t group, batch, head, token, depth;
} Tensor;

typedef struct {
    int64_t batch, queries, keys, threads;
    double scale;
    Tensor query, key, value;
    Tensor bias, mask, keep; /* padded to whole vectors; data = NULL: there is none. mask is 1 where allowed */
    Tensor out;              /* forward: the result; backward: its gradient */
    Tensor grad_query, grad_key, grad_value, grad_bias;
    int64_t part_bias; /* distance between the copies of grad_bias, one for each thread */
} Call;

/* One unit of the work (a sequence, or a group of them), for the file that includes this to define; `part` is the thread. */
static void forward(const Call *c, vec *scratch, int64_t unit, int64_t part);
static void backward(const Call *c, vec *scratch, int64_t unit, int64_t part);

/* Units are dealt to the threads in fixed contiguous parts, so that the same number of threads gives the same bits. Each
   thread has `vectors` of scratch, rounded up so that no two share a page. Returns 0, or 1 where there is no memory. */
static int deal(const Call *c, int64_t units, int64_t vectors, int back) {
    const int64_t parts = c->threads, size = (vectors + 64) / 64 * 64;
    vec *scratch = aligned_alloc(64, sizeof(vec) * size * parts);
    if (!scratch) return 1;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++)
            if (back)
                backward(c, scratch + part * size, unit, part);
            else
                forward(c, scratch + part * size, unit, part);
    free(scratch);
    return 0;
}
