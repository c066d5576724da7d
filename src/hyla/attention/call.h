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
